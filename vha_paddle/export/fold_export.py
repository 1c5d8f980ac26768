"""From a checkpoint to a Hugging Face directory: fold, write, verify, and only then give it its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import vha_paddle
from vha_paddle.checkpoint import layout
from vha_paddle.checkpoint.layout import Checkpoint
from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.config import Model
from vha_paddle.counts import parameters
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.card import cache_bytes, model_card
from vha_paddle.export.config import ExportDtype, write_json
from vha_paddle.export.plan import NUMPY_DTYPES, PlannedTensor, plan_export
from vha_paddle.export.stock import stock_class
from vha_paddle.export.tokenizer import TokenizerExport
from vha_paddle.export.verify import BOUNDS, Verification
from vha_paddle.export.writer import (
    MAX_SHARD_BYTES,
    REPORT_FILE,
    Progress,
    check_output,
    output_directory,
    write_hf_model,
)
from vha_paddle.fold import check_foldable, copy_state, fold_state
from vha_paddle.names import account, check_shape, expected_tensors, to_hf
from vha_paddle.tensor_file import DTYPE_NAMES

_FLOATING = ("F64", "F32", "F16", "BF16")

Verify = Callable[[Path, Path], Verification]
"""From the checkpoint's path and the exported directory to the comparison of their logits."""


@dataclass(frozen=True)
class Source:
    """A checkpoint known to be exportable: intact, of the right kind, with exactly the model's tensors."""

    checkpoint: Checkpoint
    tensors: LogicalTensors
    tokenizer: TokenizerExport

    @property
    def model(self) -> Model:
        """As it was trained."""
        return self.checkpoint.recipe.model


def open_source(checkpoint: Path, plain: bool) -> Source:
    """Open a checkpoint for export and check all that can be checked without reading the weights.

    Args:
        checkpoint: its directory, or a run's, whose newest is taken.
        plain: whether a model without Premix and Postmix is meant, which is exported as it is.

    Raises:
        UserError: no checkpoint, a damaged one, a model that no stock class computes or whose maps do not fold, one
            whose kind does not go with `plain`, tensors missing or unexpected, or a tokenizer that does not convert.
    """
    if (checkpoint / REPORT_FILE).is_file():
        raise UserError(f"{checkpoint}: is an export, folded already; give the checkpoint it came from")
    opened = layout.open_checkpoint(checkpoint)
    model = opened.recipe.model
    stock_class(model, str(opened.path))
    check_foldable(model, str(opened.path))
    if not model.has_maps and not plain:
        raise UserError(
            f"{opened.path}: model.attention.kind={model.attention.kind} is plain already, nothing to fold; "
            "add --plain to export it as it is"
        )
    if model.has_maps and plain:
        raise UserError(
            f"{opened.path}: layers of kind=vha hold Premix and Postmix, which no stock model does; drop --plain to "
            "fold them"
        )
    tensors, expected = opened.model_tensors(), expected_tensors(model)
    account(tensors, expected, str(tensors.path))
    for name, entry in tensors.entries.items():
        check_shape(name, entry.shape, expected[name], str(tensors.path))
        if DTYPE_NAMES[entry.dtype] not in _FLOATING:
            raise UserError(f"{tensors.path}: {name} holds {entry.dtype}; the tensors must be floating point")
    tokenizer = TokenizerExport(opened.tokenizer_path)
    if tokenizer.special.vocab_size > model.vocab_size:
        raise UserError(
            f"{opened.tokenizer_path}: {tokenizer.special.vocab_size} ids, more than model.vocab_size="
            f"{model.vocab_size}; the tokenizer belongs to another model"
        )
    return Source(opened, tensors, tokenizer)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: ExportDtype,
    *,
    overwrite: bool = False,
    plain: bool = False,
    verify: Verify | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Fold a checkpoint (with `plain`, copy one without maps) into a directory that stock clients load.

    `out` appears complete, and after verification, or not at all. The same checkpoint gives the same bytes.

    Args:
        out: the directory to make; with `overwrite` it may hold an earlier export, replaced at the very end.
        dtype: of every exported tensor. The fold is computed in float64 and rounded once.
        verify: compares the finished files with the checkpoint; its figures go into the card and the report.

    Returns:
        The report that is also written as `fold_report.json`.

    Raises:
        UserError: as `open_source` and `check_output`; weights not finite or beyond the range of `dtype`.
        RunError: the verification exceeds its bound, or the directory cannot be written.
    """
    check_output(out, overwrite)
    source = open_source(checkpoint, plain)
    if out.resolve().is_relative_to(source.checkpoint.path.resolve()):
        raise UserError(f"{out}: lies inside the checkpoint; name a directory outside it")
    planned = plan_export(source.model, dtype)
    try:
        with output_directory(out, overwrite) as directory:
            stream = _hf_tensors(source, dtype)
            write_hf_model(directory, source.model, planned, stream, source.tokenizer, max_shard_bytes, progress)
            verification = verify(source.checkpoint.path, directory) if verify is not None else None
            if verification is not None and verification.fault is not None:
                raise RunError(f"verification failed in {dtype}: {verification.fault}; nothing was kept")
            report = _report(source, planned, directory, verification)
            write_json(directory / REPORT_FILE, report)
            card = model_card(report, source.checkpoint.recipe)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error})") from None
    return report


def describe_report(report: dict[str, Any], out: Path) -> str:
    """The report in one or two lines."""
    line = f"wrote {out}: {report['tensors']} tensors, {report['bytes']:,} bytes in {report['dtype']}"
    figures = report["verification"]
    if figures is None:
        return f"{line}; logits not compared (--verify)"
    line += f"\nlogits differ by {figures['relative']:.2e} of the largest, allowed {figures['bound']:.1e}"
    if figures["fold_relative"] is not None:
        line += f"; before rounding by {figures['fold_relative']:.2e}, allowed {BOUNDS['float32']:.1e}"
    return line


class _State(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, tensors: LogicalTensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors.entries)


def folded_tensors(tensors: LogicalTensors, model: Model, dtype: ExportDtype) -> Iterator[tuple[str, np.ndarray]]:
    """A checkpoint's tensors under our names, folded if `model` has maps, one at a time in the order of the plan."""
    convert = fold_state if model.has_maps else copy_state
    yield from convert(_State(tensors), model, NUMPY_DTYPES[dtype], str(tensors.path))


def _hf_tensors(source: Source, dtype: ExportDtype) -> Iterator[tuple[str, np.ndarray]]:
    """The exported tensors."""
    for name, array in folded_tensors(source.tensors, source.model, dtype):
        yield from to_hf(name, array)


def _kinds(model: Model) -> str:
    """The attention that was trained: its kind, or both of a hybrid's."""
    return " and ".join(dict.fromkeys(attention.kind for attention in model.attentions))


def _report(
    source: Source, planned: list[PlannedTensor], directory: Path, verification: Verification | None
) -> dict[str, Any]:
    """Where the export came from, what was done, what came out."""
    recipe, state = source.checkpoint.recipe, source.checkpoint.state
    served = sum(tensor.num_bytes for tensor in planned)
    dtype = planned[0].dtype
    folded = [tensor for tensor in planned if len(tensor.sources) > 1]
    return {
        "vha_paddle": vha_paddle.__version__,
        "source": {
            "run": recipe.run.name,
            "checkpoint": source.checkpoint.path.resolve().name,
            "step": state.step,
            "tokens": state.tokens,
            "samples": state.samples,
            "seed": state.seed,
            "sequence_length": recipe.data.sequence_length,
            "vha_paddle": state.version,
            "manifest_sha256": layout.sha256_of(source.checkpoint.path / layout.MANIFEST_FILE),
            "attention": _kinds(source.model),
            "parameters": parameters(recipe.model).total,
        },
        "dtype": dtype,
        "parameters": served // NUMPY_DTYPES[dtype].itemsize,
        "tensors": len(planned),
        "bytes": served,
        "folded": {tensor.name: list(tensor.sources) for tensor in folded},
        "kv_cache_bytes_per_token_per_layer": cache_bytes(source.model),
        "verification": verification.figures() if verification is not None else None,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": layout.sha256_of(path)}
            for path in sorted(directory.iterdir())
        },
    }
