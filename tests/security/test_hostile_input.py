"""Files from anywhere: read right or refused in one line, whatever is in them; nothing is run, nothing else is read.

`tests/sources/containers/test_fuzz.py` does the same for the files of other projects' checkpoints.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.security.damage import Damage, damages
from tests.security.examples import CONFIG, EXAMPLES, METRICS
from tests.security.watch import watched
from vha_paddle.config import load_recipe
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.sources.hf_config import read_hf_model

ALLOWED_BYTES = 16 << 20
"""Of memory that Python and numpy are asked for; the examples have at most 0.2 MB."""


@functools.cache
def pristine(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    EXAMPLES[name].write(folder)
    EXAMPLES[name].read(folder)  # and what is imported when something is read for the first time
    return folder


@pytest.fixture(autouse=True, scope="module")
def _removed() -> Iterator[None]:
    yield
    for name in EXAMPLES:
        shutil.rmtree(pristine(name))
    pristine.cache_clear()


def assert_read_or_refused(read: Callable[[Path], object], folder: Path) -> str | None:
    """What a reader says of a folder, if it refuses it."""
    tracemalloc.start()
    said = None
    with watched(folder) as seen:
        try:
            read(folder)
        except UserError as error:
            said = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert not seen
    assert peak < ALLOWED_BYTES
    assert said is None or (said.isprintable() and len(said) < 2100)
    return said


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(name: str, data: st.DataObject) -> None:
    example = EXAMPLES[name]
    damage: Damage = data.draw(damages(example.file))
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        folder = Path(directory) / "copy"
        shutil.copytree(pristine(name), folder)
        path = folder / example.file
        path.write_bytes(damage(path.read_bytes()))
        example.repair(folder)
        assert_read_or_refused(example.read, folder)


def copy_of(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(pristine(name), tmp_path / "copy")


def refusal(name: str, folder: Path, content: bytes | str) -> str:
    """What is said of an example whose file has this content instead."""
    example = EXAMPLES[name]
    (folder / example.file).write_bytes(content if isinstance(content, bytes) else content.encode())
    example.repair(folder)
    said = assert_read_or_refused(example.read, folder)
    assert said is not None
    return said


def nested_aliases(depth: int) -> str:
    """A list of 10**depth values in as many lines."""
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{number} [{', '.join([f'*a{number - 1}'] * 10)}]" for number in range(1, depth)]
    return f"[{', '.join(lists)}]"


YAML_VALUES = {
    nested_aliases(9): "alias",
    "&a [*a]": "alias",
    "&a {<<: [*a, *a]}": "alias",
    "[" * 200 + "]" * 200: "deep in each other",
    "[" * 100_000: "deep in each other",
    "9" * 5000: "2000 characters",
    f"0x{'f' * 5000}": "2000 characters",
    f"0x{'f' * 1500}": "hidden_size=",
    str(2**63): "hidden_size=",
    "!!bool x": "not valid YAML",
    "!!python/object/apply:os.system [exit]": "not valid YAML",
    "!!python/name:os.system": "not valid YAML",
    "!!timestamp x": "not valid YAML",
    '!!binary "%%%"': "hidden_size=",
    "2020-13-45": "not valid YAML",
    '"\\e[31m\\n"': r"'\x1b[31m\n'",
    "1, hidden_size: 2": "",
}


@pytest.mark.parametrize(("value", "reason"), YAML_VALUES.items(), ids=range(len(YAML_VALUES)))
def test_a_hostile_value_in_a_recipe_or_an_override_is_refused(tmp_path: Path, value: str, reason: str) -> None:
    folder = copy_of("recipe", tmp_path)
    path = folder / "recipe.yaml"
    text = path.read_text()
    assert reason in assert_refused_recipe(folder, text, [f"model.hidden_size={value}"])
    assert reason in assert_refused_recipe(folder, text.replace("hidden_size: 20\n", f"hidden_size: {value}\n"), [])


def assert_refused_recipe(folder: Path, text: str, overrides: list[str]) -> str:
    (folder / "recipe.yaml").write_text(text)
    said = assert_read_or_refused(lambda folder: load_recipe(folder / "recipe.yaml", overrides), folder)
    assert said is not None
    return said


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"5: {}", b"null: 1", b"- " * 1000, b"? " * 1000, b"\0", b"", b"a: 1\na: 2"]
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal("recipe", copy_of("recipe", tmp_path), content)


@pytest.mark.parametrize("key", ["\ud800.x=1", "run.\x1b[31m=1", "=1", "model.attention.kind=[a]", f"{'a.' * 3000}b=1"])
def test_a_hostile_override_is_refused(tmp_path: Path, key: str) -> None:
    folder = copy_of("recipe", tmp_path)
    assert_refused_recipe(folder, (folder / "recipe.yaml").read_text(), [key])


HUGE_MODELS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**12, "layer_types": None},
    "sliding layers": {
        "num_hidden_layers": 10**12,
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 10**9,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 1,
    },
}


@pytest.mark.parametrize("case", HUGE_MODELS)
def test_a_model_of_absurdly_many_tensors_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIG) | HUGE_MODELS[case]))
    said = assert_read_or_refused(read_hf_model, tmp_path)
    assert said is not None and next(iter(HUGE_MODELS[case].keys() & {"num_hidden_layers", "num_experts"})) in said


@pytest.mark.parametrize("key", ["auto_map", "quantization_config"])
def test_a_config_that_names_code_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIG) | {key: {"AutoModel": "modeling.Model"}}))
    assert key in str(assert_read_or_refused(read_hf_model, tmp_path))


@pytest.mark.parametrize("value", [["qwen3"], {"qwen3": 1}], ids=str)
@pytest.mark.parametrize("key", ["model_type", "rope_theta"])
def test_a_list_or_an_object_for_a_word_or_a_number_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIG) | {key: value}))
    assert key in str(assert_read_or_refused(read_hf_model, tmp_path))


JSON_FILES = [name for name, example in EXAMPLES.items() if example.file.endswith((".json", ".jsonl"))]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '"\\ud800"', "null", "", "\xff"])
def test_json_that_is_deep_long_or_no_object_is_refused(tmp_path: Path, name: str, content: str) -> None:
    folder = copy_of(name, tmp_path)
    refusal(name, folder, content.encode("latin1") + b"\n")


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "..", "", "sub/file", "a\0b", "a\nb", "\ud800"])
def test_a_manifest_or_an_index_names_no_file_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("not yours")
    folder = copy_of("checkpoint: manifest", tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 9, "sha256": "0"}
    refusal("checkpoint: manifest", folder, json.dumps(manifest))
    weights = shutil.copytree(pristine("safetensors index"), tmp_path / "weights")
    refusal("safetensors index", weights, json.dumps({"weight_map": {"w": name}}))


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1, 2**62, -1, 1.5, "1"])
def test_the_tokenizers_library_is_given_no_absurd_id(tmp_path: Path, token_id: object) -> None:
    folder = copy_of("tokenizer.json", tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    forged = json.loads(json.dumps(whole))
    forged["model"]["vocab"]["a"] = token_id
    assert "tokenizer.json" in refusal("tokenizer.json", folder, json.dumps(forged))
    forged = json.loads(json.dumps(whole))
    forged["added_tokens"][0]["id"] = token_id
    assert "tokenizer.json" in refusal("tokenizer.json", folder, json.dumps(forged))


def test_a_panic_of_the_tokenizers_library_is_an_error(tmp_path: Path) -> None:
    folder = copy_of("tokenizer.json", tmp_path)
    forged = json.loads((folder / "tokenizer.json").read_text())
    forged["model"]["continuing_subword_prefix"] = "longer than any token"
    assert "tokenizer.json" in refusal("tokenizer.json", folder, json.dumps(forged))


@pytest.mark.parametrize(
    ("part", "list_name", "step"),
    [
        ("normalizer", "normalizers", {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}),
        ("pre_tokenizer", "pretokenizers", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}),
        ("decoder", "decoders", {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}),
    ],
)
def test_steps_that_each_double_a_text_are_refused(tmp_path: Path, part: str, list_name: str, step: object) -> None:
    """Forty of them would make a terabyte of a word."""
    folder = copy_of("tokenizer.json", tmp_path)
    forged = json.loads((folder / "tokenizer.json").read_text())
    inner = {"type": "Sequence", list_name: [step] * 20}
    forged[part] = {"type": "Sequence", list_name: [inner, inner]}
    assert f"{part} can make a text {2**40} times" in refusal("tokenizer.json", folder, json.dumps(forged))


def test_a_pattern_that_tries_too_many_ways_is_refused(tmp_path: Path) -> None:
    folder = copy_of("tokenizer.json", tmp_path)
    forged = json.loads((folder / "tokenizer.json").read_text())
    forged["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    (folder / "tokenizer.json").write_text(json.dumps(forged))
    tokenizer = load_tokenizer(folder)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="cannot be applied to a text"):
            encode("a" * 40 + "b")


def test_half_a_surrogate_pair_is_no_token(tmp_path: Path) -> None:
    folder = copy_of("tokenizer_config.json", tmp_path)
    forged = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": "\ud800"}
    assert "pad_token" in refusal("tokenizer_config.json", folder, json.dumps(forged))


def test_a_piece_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = copy_of("tokenizer.model", tmp_path)
    raw = (folder / "tokenizer.model").read_bytes()
    for piece in (b"</s>", b"<0x41>", b"w"):
        field = bytes([10, len(piece)])  # of protobuf: number 1, a string
        assert raw.count(field + piece) == 1
        refusal("tokenizer.model", folder, raw.replace(field + piece, field + b"\xff" * len(piece)))


def test_a_number_beyond_all_in_the_metrics_is_read_or_refused(tmp_path: Path) -> None:
    folder = copy_of("metrics", tmp_path)
    (folder / "metrics.jsonl").write_text(json.dumps(METRICS | {"step": 10**400}) + "\n")
    assert_read_or_refused(EXAMPLES["metrics"].read, folder)
