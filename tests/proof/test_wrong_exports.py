"""Exports gone wrong, in every dtype: what the proof says of them, and where it says that the fault is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_EXPERTS, SMALL_GROUPED, SMALL_HYBRID, SMALL_MIXTURE, SMALL_VHA
from tests.proof.exports import Made, Tensors, edit, edit_stored, make, next_number
from vha_paddle import fold
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.verify import BOUNDS, FOLDED_ATTENTION_BOUND, Verification
from vha_paddle.proof.prove import prove_export

DTYPES: tuple[ExportDtype, ...] = ("float32", "bfloat16", "fp8")
LAYER_1 = "model.layers.1.self_attn."
K, P, H, D = 2, 3, 8, 20  # of SMALL_VHA
N = K * P


def maps_of(made: Made) -> tuple[np.ndarray, ...]:
    """Layer 1 of the checkpoint: W_Q, premix, W_O and M, float64."""
    q, premix, o, a, b = (
        made.weights[LAYER_1 + name].astype(np.float64)
        for name in ("q_proj.weight", "premix", "o_proj.weight", "postmix_a", "postmix_b")
    )
    return q, premix, o, np.eye(N) + b @ a.T


def postmix_transposed(made: Made, tensors: Tensors) -> str:
    _, _, o, mix = maps_of(made)
    wrong = np.einsum("nm,mhd->nhd", mix, o.reshape(N, H, D)).reshape(N * H, D)
    tensors[f"{LAYER_1}o_proj.weight"] = wrong.T
    return "o_proj"


def postmix_lost(made: Made, tensors: Tensors) -> str:
    tensors[f"{LAYER_1}o_proj.weight"] = made.weights[f"{LAYER_1}o_proj.weight"].T.astype(np.float64)
    return "o_proj"


def premix_transposed(made: Made, tensors: Tensors) -> str:
    q, premix, _, _ = maps_of(made)
    wrong = np.einsum("dpq,khq->dkph", q.reshape(D, P, H), premix).reshape(D, N * H)
    tensors[f"{LAYER_1}q_proj.weight"] = wrong.T
    return "q_proj"


def heads_in_another_order(made: Made, tensors: Tensors) -> str:
    q = tensors[f"{LAYER_1}q_proj.weight"]
    tensors[f"{LAYER_1}q_proj.weight"] = q.reshape(K, P, H, D).swapaxes(0, 1).reshape(N * H, D)
    return "q_proj"


def keys_and_values_exchanged(made: Made, tensors: Tensors) -> str:
    k, v = f"{LAYER_1}k_proj.weight", f"{LAYER_1}v_proj.weight"
    tensors[k], tensors[v] = tensors[v], tensors[k]
    return "[kv]_proj"


def layers_exchanged(made: Made, tensors: Tensors) -> str:
    for name in [name for name in tensors if name.startswith(LAYER_1)]:
        other = name.replace("layers.1", "layers.0")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return ""


FAULTS = (
    postmix_transposed,
    postmix_lost,
    premix_transposed,
    heads_in_another_order,
    keys_and_values_exchanged,
    layers_exchanged,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_fold_in_one_layer_is_named(
    fault: Callable[[Made, Tensors], str], dtype: ExportDtype, tmp_path: Path
) -> None:
    made = make(tmp_path, SMALL_VHA, dtype)
    right = prove_export(made.source, made.directory)
    tensor = ""

    def change(tensors: Tensors) -> None:
        nonlocal tensor
        tensor = fault(made, tensors)

    edit(made.directory, change)
    found = prove_export(made.source, made.directory)
    assert found.largest_rounding > 10 and found.fault is not None
    assert re.search(f"self_attn.*{tensor}.*: a weight is", found.fault)
    assert found.attention.export[1] > 0.1 > right.attention.export[1]
    if fault is not layers_exchanged:  # the error stays in its layer, and so does its name
        assert found.largest_rounding_tensor.startswith(LAYER_1)
        assert found.attention.export[0] == right.attention.export[0]
    assert found.fold == right.fold and found.cast == right.cast  # they are of the checkpoint alone
    assert found.storage.relative > right.storage.relative


def test_a_broken_layer_is_not_seen_in_the_attention_of_the_next(tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA)
    right = prove_export(made.source, made.directory)

    def doubled(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"] *= 2

    edit(made.directory, doubled)
    found = prove_export(made.source, made.directory)
    assert found.attention.export[0] == pytest.approx(1, rel=1e-5)
    assert found.attention.export[1] == right.attention.export[1]
    assert found.export.relative > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1e-7])
def test_a_lost_postmix_that_has_learned_little_does_not_pass(
    size: float, dtype: ExportDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it moves is far below the rounding of the files, and of float32 at last, so float64 must show it."""

    def little(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("postmix_b")]:
            weights[name] *= np.float32(size)

    right = make(tmp_path / "right", SMALL_VHA, dtype, change=little)
    assert prove_export(right.source, right.directory).passed
    monkeypatch.setattr(fold, "postmix_matrix", lambda a, b: np.eye(len(a)))
    wrong = make(tmp_path / "wrong", SMALL_VHA, dtype, change=little)
    found = prove_export(wrong.source, wrong.directory)
    assert found.export.relative <= found.bound or dtype == "float32"
    assert found.attention.fold is not None and min(found.attention.fold) > FOLDED_ATTENTION_BOUND
    assert "the fold is wrong: before rounding, the attention of layer" in str(found.fault)


def test_a_wrong_premix_in_the_fold_itself_is_seen_before_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fold.fold_premix

    def transposed(q_proj_DX: Any, premix_KQH: Any) -> np.ndarray:
        return right(q_proj_DX, np.swapaxes(premix_KQH, 1, 2))

    monkeypatch.setattr("vha_paddle.fold.fold_premix", transposed)
    monkeypatch.setattr("vha_paddle.proof.prove.fold_premix", transposed)
    made = make(tmp_path, SMALL_VHA, "fp8")
    found = prove_export(made.source, made.directory)
    assert found.largest_rounding <= 1.01, "the files are the fold"
    assert found.fold is not None and found.fold.relative > 1e-2
    assert "the fold is wrong: before rounding" in str(found.fault)


@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.up_proj"])
def test_one_weight_one_step_off_is_named(name: str, dtype: ExportDtype, tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA, dtype)
    tensor = f"model.layers.1.{name}.weight"
    edit_stored(made.directory, lambda stored: next_number(stored[tensor], (3, 2)))
    found = prove_export(made.source, made.directory)
    assert found.export.relative <= found.bound, "no other figure shows it"
    assert found.largest_rounding_tensor == tensor and f"{tensor}: a weight is" in str(found.fault)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_one_value_of_the_ends_one_step_off_is_named(name: str, tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA, "bfloat16", tie_word_embeddings=False)
    edit_stored(made.directory, lambda stored: next_number(stored[name], (3,) * stored[name].ndim))
    assert f"{name}: a weight is" in str(prove_export(made.source, made.directory).fault)


def test_the_written_copy_of_a_tied_embedding_is_compared_too(tmp_path: Path) -> None:
    mla = {"kind": "mla", "num_attention_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
    made = make(tmp_path, mla | {"v_head_dim": 6}, rms_norm_eps=1e-6)
    edit_stored(made.directory, lambda stored: next_number(stored["lm_head.weight"], (7, 3)))
    assert "lm_head.weight: a weight is" in str(prove_export(made.source, made.directory).fault)


def reversed_experts(tensors: Tensors) -> None:
    last = SMALL_EXPERTS["num_experts"] - 1
    for name in [name for name in tensors if ".experts.0." in name]:
        other = name.replace(".experts.0.", f".experts.{last}.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def exchanged_gate_and_up(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name and "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def reversed_router(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = tensors[name][::-1].copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [reversed_experts, exchanged_gate_and_up, reversed_router])
def test_experts_in_a_wrong_place_do_not_pass(
    fault: Callable[[Tensors], None], dtype: ExportDtype, tmp_path: Path
) -> None:
    made = make(tmp_path, SMALL_VHA, dtype, **SMALL_MIXTURE)
    edit(made.directory, fault)
    found = prove_export(made.source, made.directory)
    assert ".mlp." in found.largest_rounding_tensor and not found.passed
    assert found.export.relative > 0.1, "steered to the same experts, it still computes other values"


def test_a_router_that_chooses_other_experts_is_counted(tmp_path: Path) -> None:
    """The one chosen expert counts 1, whatever its probability, so logits do not show it."""
    top_1 = SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"num_experts_per_tok": 1}}
    made = make(tmp_path, SMALL_VHA, **top_1)
    edit(made.directory, reversed_router)
    found = prove_export(made.source, made.directory)
    assert found.export.relative <= found.bound and not found.passed
    assert found.expert_agreement is not None and found.expert_agreement < 0.5


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("attention", "model", "changes", "message"),
    [
        (SMALL_VHA, SMALL_HYBRID, {"sliding_window": 6}, "window of layer 0 is 6, the checkpoint's 5"),
        (SMALL_VHA, SMALL_HYBRID, {"sliding_window": 4}, "window of layer 0 is 4, the checkpoint's 5"),
        (
            SMALL_VHA,
            SMALL_HYBRID,
            {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            "window of layer 1 is 5, the checkpoint's None",
        ),
        (
            SMALL_VHA,
            {},
            {"rope_theta": 1e4, "rope_parameters": None},
            "rope_theta is 10000.0, the checkpoint's 30000.0",
        ),
        (SMALL_GROUPED, {}, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the checkpoint's 0.001"),
        (SMALL_VHA, {}, {"max_position_embeddings": 128}, "max_position_embeddings is 128, the checkpoint's 64"),
        (SMALL_VHA, SMALL_MIXTURE, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, the checkpoint's 2"),
        (SMALL_VHA, SMALL_MIXTURE, {"norm_topk_prob": False}, "norm_topk_prob is False, the checkpoint's True"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_configuration_that_says_otherwise_is_a_fault(
    attention: dict[str, Any], model: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made = make(tmp_path, attention, **model)
    change_config(made.directory, changes)
    found = prove_export(made.source, made.directory)
    assert message in str(found.fault)
    if not changes.keys() & {"max_position_embeddings", "num_experts_per_tok"}:  # the experts are given
        assert found.export.relative > BOUNDS["float32"], "it computes something else, too"


def test_a_window_longer_than_the_sequences_is_seen_in_the_configuration(tmp_path: Path) -> None:
    hybrid = SMALL_HYBRID | {"sliding_window": {"window": 24, "full_every": 2}}
    made = make(tmp_path, SMALL_VHA, **hybrid)
    change_config(made.directory, {"sliding_window": 25})
    found: Verification = prove_export(made.source, made.directory, num_tokens=32)
    assert found.export.relative <= found.bound
    assert "window of layer 0 is 25" in str(found.fault)
