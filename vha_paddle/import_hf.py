"""From a Hugging Face directory to a checkpoint: tensors renamed and turned, one at a time, never recomputed.

The checkpoint is of step 0 and has no optimizer state. A run starts from it with `run.start_from`, a warm start makes
virtual heads of it, evaluation and export read it like any other; an export in the dtype that it has gives every
tensor back bit for bit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import vha_paddle
from vha_paddle.checkpoint.fresh import write_fresh_checkpoint
from vha_paddle.checkpoint.layout import write_json
from vha_paddle.config import Model, Recipe, load_recipe, recipe_from_dict
from vha_paddle.counts import parameters
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.ahead import ReadAhead
from vha_paddle.export.output import check_output, check_space, clear_what_was_left, output_directory
from vha_paddle.sources.base import Source, WeightSpec
from vha_paddle.sources.digests import Digests
from vha_paddle.sources.hugging_face import open_hugging_face
from vha_paddle.sources.own import IMPORT_REPORT_FILE

REPORT_FILE = IMPORT_REPORT_FILE
"""In the checkpoint: where it came from. By it an import is known, to be overwritten."""

Progress = Callable[[int, int], None]
"""Told, after each tensor, the bytes written so far and those of the whole."""


@dataclass(frozen=True)
class Import:
    """What is to be written, checked as far as it can be without reading the weights."""

    source: Source
    recipe: Recipe
    tokenizer_path: Path
    tokenizer: Tokenizer
    router: Mapping[str, np.ndarray[Any, Any]]
    """What the routers of a mixture of experts remember before their first step; nothing of a dense model."""

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(spec) for spec in self.source.weights.specs.values())


def plan_import(directory: Path, out: Path, recipe_file: Path | None, tokenizer_path: Path | None) -> Import:
    """Read what describes a model, and make the recipe of its checkpoint.

    Args:
        directory: with config.json, safetensors files and, unless `tokenizer_path` is given, a tokenizer.
        out: the checkpoint to make, which the recipe names.
        recipe_file: whose other sections the checkpoint's recipe gets; its model section is not used.

    Raises:
        UserError: the model is none that the decoder computes, its tensors are not exactly the described ones, it has
            no tokenizer or one with more ids than rows, or the recipe breaks a rule.
    """
    source = open_hugging_face(directory)
    path = tokenizer_path or source.tokenizer
    if path is None:
        raise UserError(f"{directory}: has no tokenizer.json, and a checkpoint needs a tokenizer; add --tokenizer PATH")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > source.model.vocab_size:
        raise UserError(
            f"tokenizer {path}: {tokenizer.vocab_size} ids, more than vocab_size={source.model.vocab_size} of "
            f"{directory}; it belongs to another model"
        )
    recipe = _recipe(source.model, directory, out, recipe_file)
    return Import(source, recipe, path, tokenizer, _fresh_router(source.model))


def _recipe(model: Model, directory: Path, out: Path, recipe_file: Path | None) -> Recipe:
    """The model with the other sections of a recipe, or with ones to be edited."""
    section = model.model_dump(mode="json", exclude_none=True)
    if recipe_file is not None:
        values = load_recipe(recipe_file).model_dump(mode="json", exclude_none=True)
        return recipe_from_dict(values | {"model": section}, source=f"{recipe_file} with the model of {directory}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).lstrip("._-") or "imported"
    values = {
        "run": {"name": name, "seed": 0, "output": f"runs/{name}", "start_from": str(out)},
        "model": section,
        "data": {
            "train": f"data/{name}/train",
            "tokenizer": str(out),
            "sequence_length": min(4096, model.max_position_embeddings),
            "global_batch_size": 64,
            "micro_batch_size": 1,
        },
        "optim": {"lr": 1e-4},
        "schedule": {"kind": "cosine", "total_tokens": 1_000_000_000, "warmup_tokens": 10_000_000, "min_lr": 1e-5},
        "checkpoint": {"interval": 1000},
    }
    return recipe_from_dict(values, source=str(directory))


def import_hf(
    planned: Import, out: Path, *, overwrite: bool = False, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Write the checkpoint; `out` appears complete or not at all, and the same directory gives the same tensors.

    Args:
        overwrite: whether `out` may hold an earlier import, replaced at the very end.

    Returns:
        The report that is also written as `import_report.json`.

    Raises:
        UserError: `out` is there already, or a file of the source is damaged.
        RunError: `out` cannot be written.
    """
    source, specs = planned.source, planned.source.weights.specs
    check_output(out, source.path, overwrite, REPORT_FILE)
    check_space(out, planned.num_bytes)
    try:
        clear_what_was_left(out)
        with (
            output_directory(out, source.path, overwrite, REPORT_FILE) as directory,
            ReadAhead(source.weights) as tensors,
            Digests(source) as digests,
        ):

            def arrays() -> Iterator[np.ndarray[Any, Any]]:
                done = 0
                for name, spec in specs.items():
                    yield tensors[name]
                    done += _num_bytes(spec)
                    progress(done, planned.num_bytes)

            write_fresh_checkpoint(
                directory,
                planned.recipe,
                planned.tokenizer_path,
                {name: (spec.dtype, spec.shape) for name, spec in specs.items()},
                arrays(),
                planned.router,
            )
            report = describe_import(planned, out) | {"files": digests.result()}
            write_json(directory / REPORT_FILE, report)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from None
    return report


def _fresh_router(model: Model) -> dict[str, np.ndarray[Any, Any]]:
    if model.experts is None:
        return {}
    from vha_paddle.model.balance import Balance  # Paddle takes seconds to load, and a dense model needs none
    from vha_paddle.parallel.mesh import Mesh

    return Balance(model.experts, model.num_hidden_layers, Mesh()).state()


def _num_bytes(spec: WeightSpec) -> int:
    return spec.dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))


def describe_import(planned: Import, out: Path) -> dict[str, Any]:
    """What is imported, as JSON values."""
    source, tokenizer = planned.source, planned.tokenizer
    specs = source.weights.specs
    return {
        "vha_paddle": vha_paddle.__version__,
        "source": str(source.path),
        "out": str(out),
        **source.provenance,
        "attention": source.model.attention.model_dump(mode="json", exclude_none=True),
        "parameters": parameters(source.model).total,
        "bytes": planned.num_bytes,
        "dtypes": dict(Counter(str(spec.dtype) for spec in specs.values())),
        "tensors": {name: list(spec.stored) for name, spec in specs.items()},
        "left_out": dict(source.weights.left_out),
        "tokenizer": {
            "path": str(planned.tokenizer_path),
            "files": sorted(tokenizer.files),
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.digest,
            "eos_token": tokenizer.eos_token,
        },
        "warnings": list(source.warnings),
    }
