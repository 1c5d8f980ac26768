"""What an export refuses, before any weight is read where that can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    Exported,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from vha_paddle.checkpoint import layout
from vha_paddle.errors import UserError
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.prepare import open_for_export, prepare_export

SLIDING = SMALL_HYBRID["sliding_window"]


def prepare(checkpoint: Path) -> None:
    """What a dry run does: no weight is read."""
    prepare_export(open_for_export(checkpoint), "float32")


def test_a_grouped_checkpoint_is_not_folded(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=r"model\.attention\.kind=grouped is plain already.*add --plain"):
        export_checkpoint(checkpoint, tmp_path / "out", "float32")


def test_a_vha_checkpoint_is_not_exported_unfolded(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layers of kind=vha hold Premix and Postmix.*drop --plain"):
        export_checkpoint(checkpoint, tmp_path / "out", "float32", plain=True)


WITHOUT_STOCK_CLASS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gate": (
        SMALL_GROUPED | {"output_gate": True},
        {},
        r"model\.attention\.output_gate=true: no stock Qwen3 has a gate",
    ),
    "vha with a gate": (
        SMALL_VHA | {"output_gate": "before_postmix"},
        {},
        r"model\.attention\.output_gate=before_postmix: no stock Qwen3 has a gate",
    ),
    "gate in sliding layers": (
        SMALL_GROUPED,
        SMALL_HYBRID | {"sliding_window": SLIDING | {"attention": SMALL_GROUPED | {"output_gate": True}}},
        r"model\.sliding_window\.attention\.output_gate=true: no stock Qwen3 has a gate",
    ),
    "other heads in sliding layers": (
        SMALL_VHA,
        SMALL_HYBRID | {"sliding_window": SLIDING | {"attention": SMALL_GROUPED | {"num_key_value_heads": 6}}},
        r"model\.sliding_window\.attention: sliding layers have 6 query heads on 6 KV heads of width 8 .* 6 .* on 2 ",
    ),
    "hybrid mixture": (
        SMALL_VHA,
        SMALL_HYBRID | SMALL_MIXTURE,
        r"model\.sliding_window with model\.experts: Qwen3-MoE has one window for all layers",
    ),
    "shared expert": (
        SMALL_VHA,
        SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"shared_expert_intermediate_size": 8}},
        r"model\.experts\.shared_expert_intermediate_size=8: Qwen3-MoE has no shared expert",
    ),
    "router bias": (
        SMALL_VHA,
        SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"router_bias_update_rate": 0.001}},
        r"model\.experts\.router_bias_update_rate=0\.001: experts were chosen with a bias",
    ),
    "capacity": (
        SMALL_VHA,
        SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"capacity_factor": 1.5}},
        r"model\.experts\.capacity_factor=1\.5: tokens pass by a full expert",
    ),
    "mla": (
        {"kind": "mla", "num_attention_heads": 2, "kv_lora_rank": 6, "qk_rope_head_dim": 4},
        {},
        r"model\.attention\.kind=mla: DeepSeek's classes differ: model\.rms_norm_eps=0\.001",
    ),
    "mfa": (
        {"kind": "mfa", "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 6},
        {},
        r"model\.attention\.kind=mfa: has nothing to fold, and no stock class computes it",
    ),
    "gva": (
        {"kind": "gva", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4},
        {},
        r"model\.attention\.kind=gva: has nothing to fold, and no stock class computes it",
    ),
    "dcmha": (
        {"kind": "dcmha", "num_attention_heads": 2, "head_dim": 8},
        {},
        r"model\.attention\.kind=dcmha: has nothing to fold, and no stock class computes it",
    ),
}


@pytest.mark.parametrize(("attention", "keys", "message"), WITHOUT_STOCK_CLASS.values(), ids=list(WITHOUT_STOCK_CLASS))
@pytest.mark.parametrize("plain", [False, True], ids=["", "plain"])
def test_a_model_that_no_stock_class_computes_is_refused_with_its_key(
    attention: dict[str, Any], keys: dict[str, Any], message: str, plain: bool, tmp_path: Path
) -> None:
    recipe = small_recipe(attention, **keys)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=f"checkpoint: {message}.*; --no-fold writes it .*tools/evaluate.py") as error:
        export_checkpoint(checkpoint, tmp_path / "out", "float32", plain=plain)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [{}, SMALL_HYBRID | {"sliding_window": SLIDING | {"attention": SMALL_GROUPED}}],
    ids=["every layer", "full layers"],
)
def test_a_map_that_does_not_fold_is_refused_before_any_weight_is_read(keys: dict[str, Any], tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA | {"postmix": "silu"}, **keys)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=r"model\.attention\.postmix=silu: SiLU lies"):
        prepare(checkpoint)


def test_an_export_is_not_folded_again(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is an export, folded already"):
        export_checkpoint(exported.directory, tmp_path / "again", "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.premix": None}, r"missing model\.layers\.1\.self_attn\.premix"),
        ({"model.extra.weight": np.zeros(3, np.float32)}, r"unexpected model\.extra\.weight"),
        (
            {"model.norm.weight": np.zeros(3, np.float32)},
            r"model\.norm\.weight has shape \[3\].*needs \[20\]",
        ),
        ({"model.norm.weight": np.zeros(20, np.int32)}, r"model\.norm\.weight holds int32"),
    ],
    ids=["missing", "unexpected", "wrong shape", "integers"],
)
def test_tensors_that_are_not_the_models_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    recipe = small_recipe(SMALL_VHA)
    weights = {name: array for name, array in (trained_weights(recipe) | change).items() if array is not None}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    with pytest.raises(UserError, match=message):
        prepare(checkpoint)
    with pytest.raises(UserError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with open(checkpoint / layout.tensor_file("model", 0, 1), "rb+") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UserError, match=r"model-00000-of-00001\.safetensors: differs from the manifest"):
        export_checkpoint(checkpoint, tmp_path / "out", "float32")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA, vocab_size=310)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match=r"320 ids, more than model\.vocab_size=310"):
        export_checkpoint(checkpoint, tmp_path / "out", "float32")


def test_an_output_inside_the_checkpoint_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="lies inside the checkpoint"):
        export_checkpoint(checkpoint, checkpoint / "out", "float32")
