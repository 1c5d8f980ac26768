"""What differs between two fingerprints of training data (`TokenBatches.fingerprint`)."""

from __future__ import annotations

from collections.abc import Sequence


def difference(before: str, now: str, names: Sequence[str]) -> str:
    """What changed, in one line.

    Args:
        before: of a checkpoint.
        now: of the run; another one.
        names: of the run's datasets, in their order.
    """
    old, new = _fields(before), _fields(now)
    if old.get("order") != new["order"]:
        return "it was ordered by another version of this package"
    for key in ("seed", "sequence_length"):
        if old[key] != new[key]:
            return f"{key} was {old[key]} and is {new[key]}"
    then, here = (fields["train"].split(",") for fields in (old, new))
    if len(then) != len(here):
        return f"it was a blend of {len(then)} and is one of {len(here)}"
    changed = []
    for name, one, other in zip(names, then, here, strict=True):
        (old_weight, old_digest), (weight, digest) = one.split("*"), other.split("*")
        if old_digest != digest:
            changed.append(f"{name} holds other tokens than the one in its place did (sha256 {old_digest[:12]})")
        elif old_weight != weight:
            changed.append(f"{name} had weight {old_weight} and has {weight}")
    return ", ".join(changed)


def _fields(fingerprint: str) -> dict[str, str]:
    return dict(field.split("=", 1) for field in fingerprint.split() if "=" in field)
