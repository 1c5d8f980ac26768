"""Open a foreign checkpoint: container, kind, layers, configuration, and at the end a model of this package."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vha_paddle.config import Model, SlidingWindow
from vha_paddle.config.check_model import check_model
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES
from vha_paddle.errors import UserError
from vha_paddle.sources.base import Source
from vha_paddle.sources.containers import Container, open_container
from vha_paddle.sources.upstream.agreement import check_agreement
from vha_paddle.sources.upstream.config import UpstreamConfig, find_config
from vha_paddle.sources.upstream.feed_forward import EXPERT_KEYS, FeedForward, FeedForwardReader, mixture_of
from vha_paddle.sources.upstream.heads import AttentionReader, Heads, Parts
from vha_paddle.sources.upstream.kinds import EXPORT, FORK, Kind, kind_of, layers_of
from vha_paddle.sources.upstream.orders import GateOrder, NormOrder, check_norm_order, gate_comes_first
from vha_paddle.sources.upstream.stored import Part, Stored
from vha_paddle.sources.upstream.weights import UpstreamWeights
from vha_paddle.sources.upstream.windows import check_sinks, full_every_of, sliding_layers, window_of
from vha_paddle.sources.wrong_fold import fold_despite_norm_order
from vha_paddle.tensors import EMBEDDING, FINAL_NORM, LM_HEAD

_HEADS = ("lm_head.weight", "shared_head.weight")
_SHOWN = 5
_STEP = re.compile(r"(?:hf_)?checkpoint-([0-9]+)")
_CORE_EPS = 1e-5  # what the core's norms have where nothing says another


def open_upstream(
    path: Path, config: Path | None = None, norm_order: NormOrder | None = None, gate_order: GateOrder | None = None
) -> Source:
    """Open a VHA checkpoint of PaddleFleet's core, of its research fork, or an unfolded export of one.

    Reads what describes the tensors, and of these only a few that must be compared: the two ends of a tied model, and
    what is allowed only where it has no effect.

    Args:
        path: as `open_container` takes it.
        config: the configuration of the training, or the folder whose `config.json` it is; None takes the one that lies
            with the tensors.
        norm_order, gate_order: what no file says; see docs/upstream.md.

    Raises:
        UserError: there is no such checkpoint, it is damaged, its parts contradict each other, something has to be
            stated, or it is a model that this package does not compute.
    """
    container = open_container(path)
    stored = Stored(container)
    kind = kind_of(stored, str(container.path))
    folders = _folders(path, container)
    found = find_config(config, folders)
    if found is None:
        raise _lacks_config(stored, kind)
    reader = _Reader(stored, kind, UpstreamConfig(found))
    model, weights = reader.model(norm_order, gate_order)
    warnings = [*container.notes, *reader.warnings(norm_order, gate_order)]
    lying = find_config(None, folders)
    if config is not None and lying is not None and lying.resolve() != found.resolve():
        warnings.append(f"{lying} was not read, {found} was given in its place")
    tokenizer = [
        folder for folder in (*folders, found.parent) if any((folder / name).is_file() for name in IDENTIFYING_FILES)
    ]
    stored_files = [*container.weights.files, *(container.masters.files if container.masters is not None else ())]
    files = [file.absolute() for file in stored_files]
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return Source(
        path=folder,
        kind=f"{kind.name}, {container.form}",
        model=model,
        weights=weights,
        tokenizer=tokenizer[0] if tokenizer else None,
        provenance=_provenance(files, folder, stored, found, {"norm_order": norm_order, "gate_order": gate_order}),
        files={str(file.relative_to(folder)): None for file in files},
        warnings=tuple(warnings),
    )


class _Reader:
    """From tensors and configuration to a model and what its tensors are made of."""

    def __init__(self, stored: Stored, kind: Kind, config: UpstreamConfig) -> None:
        """Read every layer. Raises as `open_upstream`."""
        self.stored, self.kind, self.config = stored, kind, config
        self.vocab_size, self.hidden_size = stored.matrix(kind.embedding)
        self.numbers, self.num_empty = _decoder_layers(stored, kind, config)
        self.parts: Parts = {EMBEDDING: (Part(stored.use(kind.embedding)),)}
        self.heads: list[Heads] = []
        self.feed_forwards: list[FeedForward] = []
        for layer, number in enumerate(self.numbers):
            self._read_layer(layer, f"layers.{number}.")
        self._take_vector("norm.weight", FINAL_NORM)

    def _read_layer(self, layer: int, prefix: str) -> None:
        ours = f"model.layers.{layer}."
        attention = AttentionReader(self.stored, self.kind, f"{prefix}self_attn.", self.hidden_size, self.config)
        feed_forward = FeedForwardReader(self.stored, self.kind, prefix, self.hidden_size)
        self.heads.append(attention.heads)
        self.feed_forwards.append(feed_forward.found)
        for name, parts in attention.parts.items():
            self.parts[f"{ours}self_attn.{name}"] = self._scaled(parts) if name.startswith("v_proj.") else parts
        self.parts |= {ours + name: parts for name, parts in feed_forward.parts.items()}
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            self._take_vector(prefix + name, ours + name)

    def _take_vector(self, theirs: str, ours: str) -> None:
        self.stored.check_shape(theirs, (self.hidden_size,), "the embedding needs it")
        self.parts[ours] = (Part(self.stored.use(theirs)),)

    @property
    def _value_scale(self) -> float:
        key = "attention_value_scale"
        return 1.0 if self.config.get(key) is None else self.config.number(key, "the factor of the values")

    def _scaled(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Values are multiplied by a factor, which their projection can hold."""
        return tuple(replace(part, scale=self._value_scale) for part in parts)

    def model(self, norm_order: NormOrder | None, gate_order: GateOrder | None) -> tuple[Model, UpstreamWeights]:
        """The model, and its tensors; every stored one has its place or the reason to have none."""
        config, source = self.config, str(self.stored.path)
        tied = config.flag("tie_word_embeddings")
        if tied is None:
            config.require("tie_word_embeddings", "whether the embedding is the output projection")
        self._take_head(bool(tied))
        window, slides = window_of(config), [False] * len(self.heads)
        if window is not None:
            slides = sliding_layers(config, self.heads, self.num_empty)
        elif len(set(self.heads)) > 1:
            raise config.refusal(
                "sliding_window", f"{source} has layers of different shapes; only windowed ones may differ"
            )
        check_sinks(config, self.heads, slides, source)
        check_agreement(config, self.kind, self.heads, slides)
        for heads in dict.fromkeys(self.heads):
            check_norm_order(norm_order, heads, self.kind, source)
        gates = {heads: gate_comes_first(gate_order, heads, self.kind, source) for heads in dict.fromkeys(self.heads)}
        model = self._described(bool(tied), gates, window, slides)
        check_model(model)
        if unused := self.stored.unused():
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            raise UserError(
                f"{source}: {', '.join(unused[:_SHOWN])}{more}: no tensor of a VHA decoder that can be read; what the "
                "model does with it is unknown"
            )
        weights = UpstreamWeights(self.parts, model, self.stored.left_out, source)
        if norm_order == "norm-premix":
            raise UserError(
                f"{source}: --norm-order=norm-premix: a norm between W_Q and Premix does not fold, nor has this "
                f"package such a layer; {fold_despite_norm_order(weights, model)}"
            )
        return model, weights

    def _take_head(self, tied: bool) -> None:
        present = [name for name in _HEADS if name in self.stored]
        source, embedding = self.stored.path, self.kind.embedding
        if tied:
            for name in present:
                if not self.stored.are_same(name, embedding):
                    raise self.config.refusal(
                        "tie_word_embeddings",
                        f"{source}: {self.stored.name(name)} is not {self.stored.name(embedding)}, so it is not tied",
                    )
                self.stored.leave(name, "the embedding, which is the output projection too")
            return
        if present != ["lm_head.weight"]:
            raise self.config.refusal(
                "tie_word_embeddings",
                f"{source} has {present or 'no output projection'}; untied, it has lm_head.weight",
            )
        self.stored.check_shape(present[0], (self.vocab_size, self.hidden_size), "the embedding has it")
        self.parts[LM_HEAD] = (Part(self.stored.use(present[0]), is_transposed=True),)

    def _described(self, tied: bool, gates: Mapping[Heads, bool], window: int | None, slides: Sequence[bool]) -> Model:
        config = self.config
        attentions = [heads.attention(gates[heads]) for heads in self.heads]
        sliding = None
        if window is not None and any(slides):
            full_every = full_every_of(slides, config)
            own = attentions[slides.index(True)]
            full = attentions[slides.index(False)]
            sliding = SlidingWindow(window=window, full_every=full_every, attention=None if own == full else own)
            config.agree("swa_rope_theta", config.rope_theta, "the full layers")
        for key, value in (
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", len(self.numbers)),
        ):
            config.agree(key, value, "the tensors")
        eps = config.number("rms_norm_eps", "no tensor says it, and PaddleFleet's default is 1e-5, Qwen3's 1e-6")
        config.agree("qk_norm_eps", eps, "here all norms have rms_norm_eps, which")
        model = Model(
            **self._feed_forward(),
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=len(self.numbers),
            max_position_embeddings=config.count(
                "max_position_embeddings", "the longest sequence that the model is meant to serve"
            ),
            rms_norm_eps=eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=tied,
            attention=attentions[slides.index(False)],
            sliding_window=sliding,
        )
        for key in ("initializer_range", "init_method_std"):
            if config.get(key) is not None:
                return model.model_copy(update={"initializer_range": config.number(key, "the spread at the start")})
        return model

    def _feed_forward(self) -> dict[str, Any]:
        first = self.feed_forwards[0]
        for layer, found in enumerate(self.feed_forwards):
            if found != first:
                raise UserError(
                    f"{self.stored.path}: layer {layer} has {_words(found)}, layer 0 {_words(first)} "
                    "(first_k_dense_replace, moe_layer_freq); a stock Qwen3 has the same in every layer"
                )
        if first.num_experts:
            return {"experts": mixture_of(first, self.config)}
        for key in EXPERT_KEYS:
            self.config.agree(key, 0, "tensors without experts")
        self.config.agree("intermediate_size", first.intermediate_size, "the tensors")
        return {"intermediate_size": first.intermediate_size}

    def warnings(self, norm_order: NormOrder | None, gate_order: GateOrder | None) -> list[str]:
        """What had to be assumed."""
        config, lines = self.config, []
        eps = float(config.get("rms_norm_eps"))
        if self.kind is FORK and eps != _CORE_EPS:
            lines.append(
                f"{config.path}: rms_norm_eps={eps:g} is taken, but the fork hands it on as layernorm_epsilon and its "
                f"norms read rms_norm_eps, whose default is {_CORE_EPS:g}: training may have run with {_CORE_EPS:g}; "
                "compare a logged loss with both values"
            )
        for flag, order in (("--norm-order", norm_order), ("--gate-order", gate_order)):
            if order is not None and not self.kind.has_fixed_orders:
                lines.append(f"{flag}={order} is taken as stated; no file of the checkpoint can confirm it")
        if self._value_scale != 1.0:
            lines.append(f"attention_value_scale={self._value_scale:g} is multiplied into W_V")
        if unknown := config.unknown:
            lines.append(f"{config.path}: not known here and taken to say nothing of the layers: {', '.join(unknown)}")
        return lines


def _decoder_layers(stored: Stored, kind: Kind, config: UpstreamConfig) -> tuple[list[int], int]:
    """The numbers of the decoder's layers, and how many empty ones come before them.

    Layers of multi-token prediction are left out: they read the decoder's output and it does not read theirs.

    Raises:
        UserError: a layer is missing, or they begin elsewhere than the configuration says.
    """
    numbers = layers_of(stored)
    predicting = [number for number in numbers if f"layers.{number}.eh_proj.weight" in stored]
    for short in list(stored):
        if short.startswith(tuple(f"layers.{number}." for number in predicting)):
            stored.leave(short, "multi-token prediction, which the decoder's logits do not depend on")
    numbers = [number for number in numbers if number not in predicting]
    first, key = numbers[0], "num_empty_layers_add_in_head"
    expected = 0 if kind is EXPORT else config.get(key) or 0  # an export numbers its layers without the empty ones
    if expected != first:
        raise config.refusal(
            key, f"the layers of {stored.path} begin with number {first}; give the empty layers that come before them"
        )
    if missing := sorted(set(range(first, numbers[-1] + 1)) - set(numbers)):
        raise UserError(f"{stored.path}: layer {missing[0]} is missing; copy all files of the checkpoint")
    return numbers, first


def _lacks_config(stored: Stored, kind: Kind) -> UserError:
    vocab_size, hidden_size = stored.matrix(kind.embedding)
    return UserError(
        f"{stored.path}: {kind.name}, and no config.json lies with it; name one with --config. The tensors say "
        f"vocab_size={vocab_size}, hidden_size={hidden_size}, num_hidden_layers={len(layers_of(stored))} and the "
        "shapes of the heads; they do not say rms_norm_eps, rope_theta, tie_word_embeddings, max_position_embeddings"
    )


def _words(found: FeedForward) -> str:
    if not found.num_experts:
        return f"an MLP of width {found.intermediate_size}"
    return f"{found.num_experts} experts of width {found.intermediate_size} and {found.shared_size} shared"


def _folders(path: Path, container: Container) -> list[Path]:
    """Where configuration and tokenizer of a checkpoint may lie, nearest first."""
    near = (container.path, container.path.absolute().parent, path)
    return list(dict.fromkeys(folder for folder in near if folder.is_dir()))


def _provenance(
    files: Sequence[Path], folder: Path, stored: Stored, config: Path, orders: Mapping[str, str | None]
) -> dict[str, Any]:
    steps = [match[1] for match in map(_STEP.fullmatch, reversed(folder.absolute().parts)) if match]
    return {
        "directory": folder.absolute().name,
        "step": int(steps[0]) if steps else None,
        "bytes": sum(file.stat().st_size for file in files),
        "masters": stored.has_masters,
        "config": config.name,
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        **{name: order for name, order in orders.items() if order is not None},
    }
