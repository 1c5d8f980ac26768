"""The two orders that no file records: of the norm of queries and Premix, and of the gate and Postmix.

PaddleFleet's core has one of each in its code. The research fork's generations differ, with equal names and shapes, so
there the user has to state them.
"""

from __future__ import annotations

from typing import Literal

from vha_paddle.errors import UserError
from vha_paddle.sources.upstream.heads import Heads
from vha_paddle.sources.upstream.kinds import Kind

NormOrder = Literal["premix-norm", "norm-premix"]
GateOrder = Literal["postmix-gate", "gate-postmix"]

_NORM, _GATE = "--norm-order", "--gate-order"


def check_norm_order(given: NormOrder | None, heads: Heads, kind: Kind, source: str) -> None:
    """Require that the order is known where there are two; `norm-premix` of the fork is the caller's to refuse.

    Raises:
        UserError: it has to be stated, has no effect, or contradicts the code that wrote the checkpoint.
    """
    if not heads.is_ordered:
        lacking = "a norm of queries" if heads.has_premix else "a Premix"
        if given is not None:
            raise UserError(f"{source}: {_NORM}={given}: has no effect without {lacking}; drop it")
    elif kind.has_fixed_orders:
        if given == "norm-premix":
            raise UserError(f"{source}: {_NORM}={given}: contradicts {kind.name}, whose code has Premix first; drop it")
    elif given is None:
        raise UserError(
            f"{source}: {kind.name}: whether the norm of queries comes after Premix (commit 7218402d) or before it "
            f"(0bc5edb) is written nowhere; state {_NORM} premix-norm or {_NORM} norm-premix"
        )


def gate_comes_first(given: GateOrder | None, heads: Heads, kind: Kind, source: str) -> bool:
    """Whether the gate acts on what Postmix mixes; of a layer that lacks one of them, true.

    Raises:
        UserError: as `check_norm_order`.
    """
    if not heads.has_gate or heads.rank is None:
        lacking = "a gate" if not heads.has_gate else "a Postmix"
        if given is not None:
            raise UserError(f"{source}: {_GATE}={given}: has no effect without {lacking}; drop it")
        return True
    if kind.has_fixed_orders:
        if given == "gate-postmix":
            raise UserError(
                f"{source}: {_GATE}={given}: contradicts {kind.name}, whose code has Postmix first; drop it"
            )
        return False
    if given is None:
        raise UserError(
            f"{source}: {kind.name}: whether the gate comes before Postmix (as in every version of the fork that ran "
            f"with one) or after it (as in PaddleFleet's core) is written nowhere; state {_GATE} gate-postmix or "
            f"{_GATE} postmix-gate"
        )
    return given == "gate-postmix"
