"""A checkpoint of any recipe's model with random weights, written tensor by tensor: for measuring what reads one."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vha_paddle.checkpoint import layout
from vha_paddle.config import Recipe, load_recipe, recipe_to_yaml
from vha_paddle.data.corpus import builtin_documents
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece
from vha_paddle.names import expected_tensors
from vha_paddle.rounding import BFLOAT16, rounded
from vha_paddle.tensor_file import write_tensors

ROOT = Path(__file__).resolve().parents[1]
_POOL = 1 << 22
_STATE = layout.RunState(step=1, tokens=1, samples=1, seed=0, data_fingerprint="none", version="benchmark")


def recipe_of(name: str, num_hidden_layers: int | None = None) -> Recipe:
    """One of recipes/, with another number of layers where it is given."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    if num_hidden_layers is None:
        return recipe
    model = recipe.model.model_copy(update={"num_hidden_layers": num_hidden_layers})
    return recipe.model_copy(update={"model": model})


def write_random_checkpoint(path: Path, recipe: Recipe, with_masters: bool) -> Path:
    """Write `path` as a bfloat16 run would have left it, without the optimizer's moments.

    Args:
        with_masters: whether the optimizer's file holds float32 master weights.
    """
    path.mkdir(parents=True)
    shapes = expected_tensors(recipe.model)
    files = {}
    name = layout.tensor_file("model", 0, 1)
    specs = {tensor: (BFLOAT16, shape) for tensor, shape in shapes.items()}
    arrays = (rounded(array, BFLOAT16) for array in _arrays(shapes))
    files[name] = write_tensors(path / name, specs, arrays, layout.TENSOR_METADATA)
    name = layout.tensor_file("optimizer", 0, 1)
    masters = shapes if with_masters else {}
    specs = {f"{tensor}.master": (np.dtype(np.float32), shape) for tensor, shape in masters.items()}
    files[name] = write_tensors(path / name, specs, _arrays(masters), layout.TENSOR_METADATA)
    (path / layout.RECIPE_FILE).write_text(recipe_to_yaml(recipe), encoding="utf-8")
    train_sentencepiece(itertools.islice(builtin_documents(), 100), 512, path / "tokenizer.model")
    layout.write_state(path, _STATE)
    others = (layout.RECIPE_FILE, "tokenizer.model", layout.STATE_FILE)
    layout.write_manifest(path, files | {name: layout.record_of(path / name) for name in others})
    return path


def _arrays(shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Values of about the size of weights, the same for the same shapes: stretches of one pool."""
    generator = np.random.default_rng(0)
    pool = 0.02 * generator.standard_normal(_POOL, np.float32)
    for shape in shapes.values():
        yield np.resize(np.roll(pool, int(generator.integers(_POOL))), shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="directory to make")
    parser.add_argument("recipe", help="name of one in recipes/")
    parser.add_argument("--layers", type=int, help="in the place of the recipe's")
    parser.add_argument("--masters", action="store_true", help="with float32 master weights")
    arguments = parser.parse_args()
    write_random_checkpoint(arguments.path, recipe_of(arguments.recipe, arguments.layers), arguments.masters)


if __name__ == "__main__":
    main()
