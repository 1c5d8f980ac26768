"""Rules of the attention sections: VHA's maps and gate, grouped heads, sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vha_paddle.config import Recipe, load_recipe, recipe_from_dict, recipe_to_yaml
from vha_paddle.config.attention import VirtualHeadAttention
from vha_paddle.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart.yaml"
GROUPED = {"kind": "grouped", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
VHA = {**GROUPED, "kind": "vha", "postmix_rank": 2}
WITHOUT_POSTMIX = {**VHA, "postmix": "none", "postmix_rank": None}
NARROW = {**VHA, "physical_head_dim": 16, "premix_init": "orthogonal"}


def recipe_with(attention: dict[str, Any], sliding: dict[str, Any] | None, **sections: dict[str, Any]) -> Recipe:
    """The quickstart with these attentions, and further keys of other sections."""
    values: dict[str, Any] = load_recipe(QUICKSTART).model_dump(mode="json")
    values["model"] |= {"attention": attention, "sliding_window": sliding}
    values["parallel"]["tensor"] = 1
    kinds = {attention["kind"], ((sliding or {}).get("attention") or {}).get("kind")}
    values["optim"]["decay_target"] = "zero" if "vha" in kinds else None
    for section, keys in sections.items():
        values[section] |= keys
    return recipe_from_dict(values, source="test")


def error_of(attention: dict[str, Any], sliding: dict[str, Any] | None = None, **sections: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        recipe_with(attention, sliding, **sections)
    return str(caught.value).removeprefix("test: ")


@pytest.mark.parametrize(
    "attention",
    [
        {**GROUPED, "output_gate": True},
        {**VHA, "premix": "silu", "postmix": "silu", "output_gate": "after_postmix"},
        {**VHA, "postmix_space": "weight", "output_gate": "before_postmix"},
        {**VHA, "premix_init": "orthogonal"},
        WITHOUT_POSTMIX | {"output_gate": "before_postmix"},
        {**VHA, "premix": "none"},
        NARROW,
        {**NARROW, "physical_head_dim": 33, "premix": "silu"},
    ],
)
@pytest.mark.parametrize("sliding", [None, {"window": 64, "full_every": 4}])
def test_what_fits_together_is_accepted(attention: dict[str, Any], sliding: dict[str, Any] | None) -> None:
    assert recipe_with(attention, sliding).model.attention.kind == attention["kind"]
    section = {"window": 64, "full_every": 2, "attention": attention}
    assert len(recipe_with({**GROUPED, "num_key_value_heads": 4}, section).model.attentions) == 2


def test_no_gate_may_be_written_as_in_grouped_attention() -> None:
    """A recipe with all its defaults written out changes its kind without another word for no gate."""
    recipe = recipe_with({**VHA, "output_gate": False}, None)
    assert recipe == recipe_with(VHA, None)
    assert recipe_to_yaml(recipe) == recipe_to_yaml(recipe_with(VHA, None))
    schema = VirtualHeadAttention.model_json_schema()["properties"]["output_gate"]
    assert schema["enum"] == ["none", "before_postmix", "after_postmix", False]
    assert "output_gate=True: must be" in error_of({**VHA, "output_gate": True})
    assert "output_gate=0: must be" in error_of({**VHA, "output_gate": 0})


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (
            {**VHA, "head_dim": 33},
            "head_dim=33: RoPE turns pairs of channels, so it must be even; use 34",
        ),
        (
            {**GROUPED, "num_attention_heads": 9},
            "num_attention_heads=9: must be a multiple of {}.num_key_value_heads=2; use 8 or 10",
        ),
        (
            {**WITHOUT_POSTMIX, "premix": "none"},
            "premix=none: with postmix=none nothing of VHA is left; use kind=grouped",
        ),
        (
            {**VHA, "premix": "none", "physical_head_dim": 16},
            "physical_head_dim=16: has no effect with premix=none; remove the key",
        ),
        (
            {**VHA, "premix": "none", "premix_init": "unscaled"},
            "premix_init=unscaled: has no effect with premix=none; remove the key",
        ),
        (
            {**VHA, "premix": "none", "premix_init_noise": 0.2},
            "premix_init_noise=0.2: has no effect with premix=none; remove the key",
        ),
        (
            {**VHA, "physical_head_dim": 16},
            "premix_init=scaled: there is no identity between physical_head_dim=16 and head_dim=32; use orthogonal",
        ),
        (
            {**VHA, "premix_init": "orthogonal", "premix_init_noise": 0.2},
            "premix_init_noise=0.2: has no effect with premix_init=orthogonal; remove the key",
        ),
        (
            {**VHA, "postmix": "none"},
            "postmix_rank=2: has no effect with postmix=none; remove the key",
        ),
        (
            {**WITHOUT_POSTMIX, "postmix_init_std": 0.1},
            "postmix_init_std=0.1: has no effect with postmix=none; remove the key",
        ),
        (
            {**WITHOUT_POSTMIX, "postmix_space": "weight"},
            "postmix_space=weight: has no effect with postmix=none; remove the key",
        ),
        (
            {**WITHOUT_POSTMIX, "output_gate": "after_postmix"},
            "output_gate=after_postmix: there is no Postmix with postmix=none; use before_postmix",
        ),
        (
            {**VHA, "postmix_rank": None},
            "postmix_rank=null: required with postmix=linear; the paper uses num_attention_heads / 4, 2",
        ),
        (
            {**VHA, "postmix": "silu", "postmix_space": "weight"},
            "postmix_space=weight: SiLU lies between Postmix's factors (postmix=silu); use activation",
        ),
        (
            {**VHA, "output_gate": "after_postmix", "postmix_space": "weight"},
            "postmix_space=weight: a gate lies between (output_gate=after_postmix); use activation",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_broken_rule_names_the_section_that_breaks_it(attention: dict[str, Any], expected: str) -> None:
    assert error_of(attention) == f"model.attention.{expected.format('model.attention')}"
    section = "model.sliding_window.attention"
    sliding = {"window": 64, "full_every": 2, "attention": attention}
    assert error_of(GROUPED, sliding) == f"{section}.{expected.format(section)}"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kind": "grouped"}, "num_attention_heads: required key is missing; add it"),
        ({**GROUPED, "postmix_rank": 2}, "postmix_rank: unknown key; it belongs to kind vha; remove it, or change "),
        ({"kind": "vha", "head_dims": 32}, "num_attention_heads: required key is missing; add it"),
        ({"kind": "mla"}, "kind=mla: must be one of grouped, vha; known here: grouped, vha"),
    ],
)
def test_a_wrong_section_of_the_sliding_layers_is_named_in_one_line(keys: dict[str, Any], expected: str) -> None:
    message = error_of(VHA, {"window": 64, "full_every": 2, "attention": keys})
    assert message.startswith(f"model.sliding_window.attention.{expected}") and "\n" not in message


def test_the_window_is_for_grouped_and_virtual_heads() -> None:
    latent = {"kind": "mfa", "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 64}
    assert error_of(latent, {"window": 64, "full_every": 2}) == (
        "model.sliding_window: is for attention of kind grouped or vha, and model.attention.kind=mfa; remove the "
        "section"
    )
    assert error_of(GROUPED, {"window": 64, "full_every": 2, "attention": latent}) == (
        "model.sliding_window.attention.kind=mfa: must be one of grouped, vha; known here: grouped, vha"
    )


def test_one_layer_sees_all_of_the_sequence() -> None:
    assert error_of(GROUPED, {"window": 64, "full_every": 5}) == (
        "model.sliding_window.full_every=5: exceeds model.num_hidden_layers=4, so that no layer would see all of the "
        "sequence; lower it"
    )
    assert error_of(GROUPED, {"window": 64, "full_every": 1}).startswith("model.sliding_window.full_every=1: ")
    assert error_of(GROUPED, {"window": 0, "full_every": 2}).startswith("model.sliding_window.window=0: ")


def test_a_window_is_shorter_than_the_sequence() -> None:
    assert recipe_with(GROUPED, {"window": 255, "full_every": 2}).model.window_of(0) == 255
    assert error_of(GROUPED, {"window": 256, "full_every": 2}) == (
        "model.sliding_window.window=256: has no effect on sequences of data.sequence_length=256; use a smaller one or "
        "remove model.sliding_window"
    )


def test_decay_to_the_identity_needs_one_in_every_section() -> None:
    sliding = {"window": 64, "full_every": 2, "attention": NARROW}
    expected = "there is no identity between {}.physical_head_dim=16 and head_dim=32; use zero or none"
    to_identity = {"decay_target": "identity"}
    assert error_of(NARROW, optim=to_identity) == f"optim.decay_target=identity: {expected.format('model.attention')}"
    assert error_of(VHA, sliding, optim=to_identity) == (
        f"optim.decay_target=identity: {expected.format('model.sliding_window.attention')}"
    )


def test_maps_of_sliding_layers_decay_too() -> None:
    sliding = {"window": 64, "full_every": 2, "attention": VHA}
    assert recipe_with(GROUPED, sliding).optim.decay_target == "zero"
    assert error_of(GROUPED, sliding, optim={"decay_target": None}).startswith(
        "optim.decay_target=null: model.sliding_window.attention.kind=vha needs to know where decay pulls"
    )
    assert error_of(GROUPED, {"window": 64, "full_every": 2}, optim={"decay_target": "zero"}) == (
        "optim.decay_target=zero: has no effect with model.attention.kind=grouped; remove the key"
    )


def test_tensor_parallelism_divides_the_heads_of_full_and_of_sliding_layers() -> None:
    sliding = {"window": 64, "full_every": 2, "attention": {**GROUPED, "num_key_value_heads": 1}}
    assert recipe_with({**GROUPED, "num_key_value_heads": 4}, sliding, parallel={"tensor": 4}).num_ranks == 4
    sliding["attention"] = {**VHA, "num_attention_heads": 4}
    assert error_of(VHA, sliding, parallel={"tensor": 4}) == (
        "parallel.tensor=4: must divide model.sliding_window.attention's physical heads (num_attention_heads / "
        "num_key_value_heads)=2; use 1 or 2"
    )
    sliding["attention"] = VHA
    assert error_of({**VHA, "num_attention_heads": 4}, sliding, parallel={"tensor": 4}) == (
        "parallel.tensor=4: must divide model.attention's physical heads (num_attention_heads / "
        "num_key_value_heads)=2; use 1 or 2"
    )
    sliding["attention"] = {**GROUPED, "num_attention_heads": 12, "num_key_value_heads": 6}
    assert error_of(GROUPED, sliding, parallel={"tensor": 4}) == (
        "parallel.tensor=4: must divide model.sliding_window.attention.num_key_value_heads=6 or be a multiple of it; "
        "use 1 or 2"
    )


def test_a_section_of_a_recipe_must_say_its_kind_though_its_class_knows_it() -> None:
    without = {key: value for key, value in VHA.items() if key != "kind"}
    values: dict[str, Any] = load_recipe(QUICKSTART).model_dump(mode="json")
    values["model"]["attention"] = without
    with pytest.raises(UserError, match=r"^test: model\.attention\.kind: required key is missing; use "):
        recipe_from_dict(values, source="test")
    assert error_of(GROUPED, {"window": 64, "full_every": 2, "attention": without}).startswith(
        "model.sliding_window.attention.kind: required key is missing"
    )
