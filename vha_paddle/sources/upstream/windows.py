"""Which layers attend through a window, and whether attention has a sink."""

from __future__ import annotations

from collections.abc import Sequence

from vha_paddle.errors import UserError
from vha_paddle.sources.upstream.config import UpstreamConfig
from vha_paddle.sources.upstream.heads import Heads

_FREQUENCY = "window_attn_skip_freq"
_SLIDING = "sliding_attention"


def window_of(config: UpstreamConfig) -> int | None:
    """Keys that a query of a sliding layer sees, its own position included; None where all layers see everything.

    Raises:
        UserError: the window is given in a form that does not say one number of keys, or layers slide without one.
    """
    window = config.get("sliding_window")
    if config.flag("use_sliding_window") is False or window in (None, 0, -1):
        if _SLIDING in (config.get("layer_types") or ()):
            raise config.refusal("layer_types", "has layers with a window, and the configuration has no window in use")
        return None
    if isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**63:
        raise config.refusal(
            "sliding_window",
            "must be the number of keys that a query sees, its own position included (PaddleFleet counts pairs in two "
            "ways)",
        )
    return window


def sliding_layers(config: UpstreamConfig, heads: Sequence[Heads], num_empty: int) -> list[bool]:
    """Of each layer, whether it has the window.

    A number N means one full layer in N. Versions of PaddleFleet that count layers from 0 make layers 0, N, 2N full,
    those that count from 1 layers N-1, 2N-1; so it is taken only where the layers' shapes leave one of the two.

    Raises:
        UserError: the configuration leaves the layers open.
    """
    fitting = {pattern for pattern in _patterns(config, len(heads), num_empty) if _fits(pattern, heads)}
    if len(fitting) > 1:
        raise config.refusal(
            _FREQUENCY,
            f"versions of PaddleFleet count layers from 0 or from 1; write it as a list of {len(heads)} numbers, 1 for "
            "a layer with the window and 0 for a full one",
        )
    if not fitting:
        raise config.refusal(_FREQUENCY, "the layers' shapes differ in another pattern; it belongs to another model")
    return list(fitting.pop())


def _patterns(config: UpstreamConfig, count: int, num_empty: int) -> set[tuple[bool, ...]]:
    """What the configuration can mean, before the layers' shapes are looked at."""
    frequency, types = config.get(_FREQUENCY), config.get("layer_types")
    stated = None
    if types is not None:
        if not isinstance(types, list) or len(types) != count:
            raise config.refusal("layer_types", f"must name the attention of each of {count} layers")
        stated = tuple(entry == _SLIDING for entry in types)
    if frequency is None:
        return {(True,) * count if stated is None else stated}
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0:
        starts = {start + shift for start in (0, 1) for shift in (0, num_empty)}
        patterns = {tuple((layer + start) % frequency != 0 for layer in range(count)) for start in starts}
    elif isinstance(frequency, list) and len(frequency) in (count, count + num_empty):
        patterns = {tuple(bool(entry) for entry in frequency[len(frequency) - count :])}
    else:
        raise config.refusal(_FREQUENCY, f"must be a list with 1 (window) or 0 (full) for each of {count} layers")
    return patterns if stated is None else patterns & {stated}


def _fits(slides: Sequence[bool], heads: Sequence[Heads]) -> bool:
    """Whether the layers of each sort are alike."""
    return all(len({h for h, s in zip(heads, slides, strict=True) if s is sort}) <= 1 for sort in (True, False))


def full_every_of(slides: Sequence[bool], config: UpstreamConfig) -> int:
    """Of each so many layers the last one is full.

    Raises:
        UserError: the layers alternate in another way.
    """
    every = slides.index(False) + 1 if False in slides else 0
    if every < 2 or any(slide is (layer % every == 0) for layer, slide in enumerate(slides, start=1)):
        raise config.refusal(
            _FREQUENCY,
            "makes the full layers "
            f"{[layer for layer, slide in enumerate(slides) if not slide][:8]}; here one full layer comes after "
            "equally many with the window",
        )
    return every


def check_sinks(config: UpstreamConfig, heads: Sequence[Heads], slides: Sequence[bool], source: str) -> None:
    """A learned sink has to be in the files wherever the training had one. The ones that are there add nothing.

    Raises:
        UserError: one is missing, or the softmax has a constant one.
    """
    softmax = config.get("softmax_type")
    if softmax not in (None, "vanilla", "learnable"):
        raise config.refusal("softmax_type", "adds a constant to the denominator of every softmax; it cannot be read")
    for layer, (found, slide) in enumerate(zip(heads, slides, strict=True)):
        key = "add_swa_attention_sink_bias" if slide else "add_full_attention_sink_bias"
        said = True if softmax == "learnable" else config.flag(key)
        if found.has_sink or said is False or (said is None and not slide):
            continue
        if said is None:
            raise UserError(
                f"{config.path}: {key} is missing: PaddleFleet's default is true, and {source} has no sinks; if the "
                "training had none, add it as false"
            )
        cause = "softmax_type" if softmax == "learnable" else key
        raise config.refusal(
            cause, f"layer {layer} of {source} has no core_attention.softmax_offset; copy all its files"
        )
