"""Read an exported (stock Qwen3 or Qwen3-MoE) directory back: its model from config.json, its tensors as ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.config import GroupedAttention, MixtureOfExperts, Model, SlidingWindow
from vha_paddle.errors import UserError
from vha_paddle.export.stock import DENSE, MIXTURE
from vha_paddle.names import account, check_shape, expected_tensors, from_hf, hf_tensors
from vha_paddle.tensor_file import TensorFile, read_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# What the architecture here has no other form of; a key that is absent means the same.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "rope_scaling": None}
_FIXED_OF_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}


def read_hf_model(directory: Path) -> Model:
    """The model section that describes a stock Qwen3 or Qwen3-MoE directory.

    Raises:
        UserError: there is no readable config.json, or it describes another architecture.
    """
    path = directory / CONFIG_FILE
    values = _read_json(path)
    types = (DENSE.model_type, MIXTURE.model_type)
    if values.get("model_type") not in types:
        raise UserError(f"{path}: model_type={values.get('model_type')}: only {' and '.join(types)} can be read")
    has_experts = values["model_type"] == MIXTURE.model_type
    for key, value in (_FIXED | (_FIXED_OF_EXPERTS if has_experts else {})).items():
        if values.get(key, value) != value:
            raise UserError(f"{path}: {key}={json.dumps(values[key])}: only {json.dumps(value)} can be read")
    try:
        feed_forward: dict[str, Any] = {"intermediate_size": values["intermediate_size"]}
        if has_experts:
            feed_forward = {"experts": _experts(values)}
        return Model(
            **feed_forward,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            num_hidden_layers=values["num_hidden_layers"],
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values["rope_theta"],
            initializer_range=values["initializer_range"],
            tie_word_embeddings=values["tie_word_embeddings"],
            attention=GroupedAttention(
                kind="grouped",
                num_attention_heads=values["num_attention_heads"],
                num_key_value_heads=values["num_key_value_heads"],
                head_dim=values["head_dim"],
            ),
            sliding_window=_sliding_window(values, path) if values["use_sliding_window"] else None,
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; export the model again") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: not a Qwen3 configuration ({' '.join(str(error).split())})") from None


def _experts(values: Mapping[str, Any]) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=values["num_experts"],
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
        router_aux_loss_coef=values["router_aux_loss_coef"],
    )


def _sliding_window(values: Mapping[str, Any], path: Path) -> SlidingWindow:
    """The window, if the layers that have it repeat as `SlidingWindow` says."""
    types = values["layer_types"]
    full_every = types.index("full_attention") + 1 if "full_attention" in types else 0
    layers = range(1, values["num_hidden_layers"] + 1)
    expected = ["sliding_attention" if full_every and layer % full_every else "full_attention" for layer in layers]
    if full_every < 2 or types != expected:
        raise UserError(f"{path}: layer_types: only one full layer after equally many sliding ones can be read")
    return SlidingWindow(window=values["sliding_window"], full_every=full_every)


def read_hf_tensors(directory: Path, model: Model) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor of `model` as (our name, array in our orientation), one at a time, in the order of its layers.

    Raises:
        UserError: a file is missing or damaged, or the tensors are not exactly the model's.
    """
    theirs = _Tensors([read_tensors(file) for file in weight_files(directory)])
    ours = expected_tensors(model)
    expected = {hf_name: size for name, shape in ours.items() for hf_name, size in hf_tensors(name, shape).items()}
    account(theirs, expected, str(directory))
    for hf_name, size in expected.items():
        check_shape(hf_name, theirs.shape(hf_name), size, str(directory))
    for name, shape in ours.items():
        yield name, from_hf(name, shape, theirs)


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors of several files, each read when it is asked for."""

    def __init__(self, files: list[TensorFile]) -> None:
        self._file_of = {name: file for file in files for name in file}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file_of[name].array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or the shards its index names."""
    index = directory / INDEX_FILE
    if not index.exists():
        return [directory / WEIGHTS_FILE]
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{index}: weight_map must name files of this directory; export the model again")
    return [directory / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give an exported model directory") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; export the model again")
    return values
