"""FP8 weights in blocks: against arithmetic with exact fractions, and through files as torch reads them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import SMALL_MIXTURE, SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from tests.export.stock_directories import hf_arrays
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.errors import UserError
from vha_paddle.export import fp8
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.prepare import prepare_export
from vha_paddle.export.stock import stock_target
from vha_paddle.sources.own import open_own

# Every finite E4M3, from its definition: 4 bits of exponent with bias 7, 3 of fraction; 0x7F is no number.
E4M3 = sorted(
    {
        sign * (Fraction(fraction, 8) + (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 7)
        for sign in (1, -1)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    }
)


def nearest(value: Fraction) -> Fraction:
    """To nearest, ties to the even fraction."""
    best = min(abs(value - each) for each in E4M3)
    candidates = [each for each in E4M3 if abs(value - each) == best]
    if len(candidates) == 1:
        return candidates[0]
    return next(each for each in candidates if E4M3.index(each) % 2 == E4M3.index(Fraction(0)) % 2)


def test_values_are_rounded_to_nearest_ties_to_even() -> None:
    generator = np.random.default_rng(0)
    weight = (generator.standard_normal((3, 40)) * 2.0 ** generator.integers(-14, 1, (3, 40))).astype(np.float32)
    weight[0, :8] = np.array([448, 17, 19, -17, 1.0625, 1.1875, 2**-10, 3 * 2**-10]) * 2.0**-8  # the scale, and ties
    weight[1:] = np.clip(weight[1:], -1.75, 1.75)
    quantised, scales = fp8.quantise(weight)
    assert scales.shape == (1, 1) and scales[0, 0] == 2.0**-8
    for stored, value in zip(quantised.reshape(-1), weight.reshape(-1), strict=True):
        assert Fraction(float(stored)) == nearest(Fraction(float(value)) * 256), value


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (1, 129), (256, 5)], ids=str)
def test_each_block_has_the_scale_of_its_largest_value(shape: tuple[int, int], dtype: Any) -> None:
    weight = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    quantised, scales = fp8.quantise(weight)
    assert scales.shape == fp8.scale_shape(shape) and scales.dtype == np.float32
    assert quantised.dtype == ml_dtypes.float8_e4m3fn and quantised.shape == shape
    back = fp8.dequantise(quantised, scales)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = (slice(row, row + 128), slice(column, column + 128))
            scale = scales[row // 128, column // 128]
            assert scale == np.float32(np.abs(weight[block]).max() / 448)
            assert float(np.abs(quantised[block].astype(np.float32)).max()) == 448
            np.testing.assert_array_equal(back[block], quantised[block].astype(np.float32) * scale)
            bound = np.maximum(np.abs(weight[block]) * fp8.RELATIVE_ROUNDING, scale * 2.0**-10) * (1 + 1e-6)
            assert (np.abs(back[block] - weight[block]) <= bound).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38])
def test_blocks_of_zeros_and_of_extreme_values_stay_finite(value: float) -> None:
    weight = np.full((2, 130), value, np.float32)
    weight[:, 128:] = 1.0
    back = fp8.dequantise(*fp8.quantise(weight))
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back, weight, rtol=2.0**-4, atol=2.0**-135)


@pytest.fixture(scope="module", params=["dense", "mixture"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray]]:
    """An FP8 directory, and the fold in float32 under the same names."""
    folder = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden_size": 256, "tie_word_embeddings": False}
    wide = {"head_dim": 32, "num_attention_heads": 12}  # q_proj of 3 x 2 blocks, k_proj of less than one
    recipe = small_recipe(SMALL_VHA | wide, **sizes, **(SMALL_MIXTURE if request.param == "mixture" else {}))
    weights = trained_weights(recipe)
    checkpoint = write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, folder / "out", "fp8")
    return folder / "out", hf_arrays(recipe.model, weights, stock_target(recipe.model, "test"))


def test_only_the_matrices_of_the_layers_are_quantised(exported: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, folded = exported
    quantised = {
        name
        for name, array in folded.items()
        if array.ndim == 2 and ".layers." in name and not name.endswith(".mlp.gate.weight")
    }
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(stored) == set(folded) | {f"{name}_scale_inv" for name in quantised}
    for name, array in folded.items():
        expected = torch.float8_e4m3fn if name in quantised else torch.bfloat16
        assert stored[name].dtype == expected and tuple(stored[name].shape) == array.shape, name
        if name not in quantised:
            np.testing.assert_array_equal(
                stored[name].double().numpy(), array.astype(ml_dtypes.bfloat16).astype(np.float64), err_msg=name
            )
            continue
        scales = stored[f"{name}_scale_inv"]
        assert scales.dtype == torch.float32
        blocks = scales.repeat_interleave(128, 0)[: array.shape[0]].repeat_interleave(128, 1)[:, : array.shape[1]]
        back = stored[name].float() * blocks
        bound = np.maximum(np.abs(array) / 16, blocks.numpy() * 2.0**-10) * (1 + 1e-5)
        assert (np.abs(back.numpy() - array) <= bound).all(), name


def test_a_reader_that_takes_in_the_scales_computes_what_we_do(
    exported: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """transformers' class of the directory without its quantization_config, with weights taken in by torch."""
    directory, folded = exported
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32, attn_implementation="eager").eval()
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        theirs, ours = {}, {}
        for name in folded:
            tensor = file.get_tensor(name)
            if tensor.dtype == torch.float8_e4m3fn:
                scales = file.get_tensor(f"{name}_scale_inv")
                rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
                theirs[name] = tensor.float() * scales[rows][:, columns]
                ours[name] = torch.tensor(fp8.dequantise(*fp8.quantise(folded[name])))
            else:
                theirs[name] = tensor.float()
                ours[name] = torch.tensor(fp8.rounded(folded[name], fp8.BESIDE).astype(np.float32))
    tokens_BS = torch.tensor(np.random.default_rng(1).integers(0, 330, (2, 9)))
    logits = []
    for state in (theirs, ours):
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not missing and not unexpected
        with torch.no_grad():
            logits.append(model(tokens_BS).logits.double().numpy())
    assert_close(logits[0], logits[1], FLOAT32, "logits")


def test_the_report_counts_what_is_stored(exported: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, folded = exported
    report = json.loads((directory / "fold_report.json").read_text())
    assert report["dtype"] == "fp8" and report["parameters"] == sum(array.size for array in folded.values())
    file = (directory / "model.safetensors").stat().st_size
    header = int.from_bytes((directory / "model.safetensors").read_bytes()[:8], "little")
    assert report["bytes"] == file - header - 8


SIZES: dict[str, tuple[dict[str, tuple[int, int]], set[str]]] = {
    "whole": ({"q_proj": (256, 128), "k_proj": (128, 128), "o_proj": (128, 256)}, {"q_proj", "k_proj", "o_proj"}),
    "less than a block": ({"q_proj": (64, 128), "o_proj": (128, 64)}, {"q_proj", "o_proj"}),
    "an edge": ({"o_proj": (128, 160), "down_proj": (128, 128)}, {"down_proj"}),
    "one of the joined": ({"q_proj": (256, 128), "k_proj": (192, 128), "v_proj": (128, 128)}, set()),
    "DeepSeek's latents": ({"q_a_proj": (256, 128), "kv_a_proj_with_mqa": (576, 128)}, set()),
    "latents apart": ({"q_proj": (256, 128), "kv_a_proj_with_mqa": (576, 128)}, {"q_proj"}),
    "a router": ({"gate": (128, 128), "gate_proj": (128, 128)}, {"gate_proj"}),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_matrix_is_quantised_with_those_it_is_joined_with_or_not_at_all(case: str) -> None:
    sizes, expected = SIZES[case]
    tensors = {f"model.layers.7.mlp.{name}.weight": shape for name, shape in sizes.items()}
    tensors |= {"model.embed_tokens.weight": (128, 128), "lm_head.weight": (128, 128)}
    assert fp8.quantised_tensors(tensors) == {f"model.layers.7.mlp.{name}.weight" for name in expected}
    others = [f"model.layers.7.mlp.{name}" for name in sizes if name not in expected]
    assert fp8.quantization_config(tensors)["modules_to_not_convert"] == ["lm_head", *others]


def test_a_model_without_whole_blocks_is_refused(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80, "postmix_rank": 1}
    recipe = small_recipe(SMALL_VHA | sizes, hidden_size=144, intermediate_size=144)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=r"hidden_size=144 is no multiple of 128, so that no projection .* 128 x 128"):
        prepare_export(open_own(checkpoint), "fp8")


def test_the_edges_that_leave_nothing_to_quantise_are_named(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80, "postmix_rank": 1}
    recipe = small_recipe(SMALL_VHA | sizes, hidden_size=128, intermediate_size=144)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=r"144, 160 are no multiple of 128"):
        prepare_export(open_own(checkpoint), "fp8")


def test_a_directory_of_our_own_class_is_not_quantised(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="fp8 is for what a stock class computes"):
        prepare_export(open_own(checkpoint), "fp8", fold="none")
