"""From a checkpoint to a Hugging Face directory: fold, write, verify, and only then give it its name.

Every tensor passes through memory once. One thread reads ahead, the calling one folds, casts and turns matrices around,
a third writes, a fourth digests what is written, a fifth what is read. Tensors are asked for and written in one order,
so the same checkpoint gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

import vha_paddle
from vha_paddle.checkpoint.layout import record_of
from vha_paddle.counts import parameters
from vha_paddle.errors import RunError
from vha_paddle.export import fp8
from vha_paddle.export.ahead import ReadAhead
from vha_paddle.export.card import cache_bytes, model_card
from vha_paddle.export.config import ExportDtype, generation_config, hf_config, write_json
from vha_paddle.export.output import REPORT_FILE, check_output, check_space, clear_what_was_left, output_directory
from vha_paddle.export.plan import NUMPY_DTYPES
from vha_paddle.export.prepare import Export, open_for_export, prepare_export
from vha_paddle.export.writer import MAX_SHARD_BYTES, Progress, write_weights
from vha_paddle.fold import convert_state
from vha_paddle.names import to_hf
from vha_paddle.sources.base import Source
from vha_paddle.sources.digests import Digests
from vha_paddle.tensor_file import FileRecord


class Outcome(Protocol):
    """What a verification gives."""

    @property
    def fault(self) -> str | None:
        """What is not as it must be."""

    def figures(self) -> dict[str, Any]:
        """JSON values for the report."""

    def describe(self) -> str:
        """The same in a few lines."""


Verify = Callable[[Source, Path], Outcome]
"""From the checkpoint and the exported directory to the comparison of the two models."""


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
    """`write_export` of what lies at `checkpoint`: of a run directory the newest. Raises as the functions it calls."""
    source = open_for_export(checkpoint)
    check_output(out, source.path, overwrite)
    export = prepare_export(source, dtype, plain=plain)
    return write_export(
        export, out, overwrite=overwrite, verify=verify, max_shard_bytes=max_shard_bytes, progress=progress
    )


def write_export(
    export: Export,
    out: Path,
    *,
    overwrite: bool = False,
    verify: Verify | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fold a checkpoint (or copy one without maps) into a directory that clients load.

    `out` appears complete, and after verification, or not at all. The same checkpoint gives the same bytes.

    Args:
        out: the directory to make; with `overwrite` it may hold an earlier export, replaced at the very end.
        verify: compares the finished files with the checkpoint; its figures go into the card and the report.
        say: told, a line each, what killed runs had left and what was done with it.

    Returns:
        The report that is also written as `fold_report.json`.

    Raises:
        UserError: as `check_output`; weights not finite or beyond the range of the dtype; a file of the checkpoint is
            damaged.
        RunError: the verification exceeds its bound, or the directory cannot be written.
    """
    source, plan = export.source, export.plan
    try:
        for line in clear_what_was_left(out):
            say(line)
        check_output(out, source.path, overwrite)
        check_space(out, plan.num_bytes)
        with output_directory(out, source.path, overwrite) as directory:
            # products are small, and there are threads enough here: those of a BLAS would wait at their expense
            with threadpool_limits(1, "blas"), Digests(source) as digests:
                with ReadAhead(source.weights) as state:
                    stream = _tensors(export, state)
                    weights = write_weights(directory, plan.targets, stream, max_shard_bytes, progress)
                    state.check_all_read()
                source_files = digests.result()
            _write_settings(export, directory)
            outcome = verify(source, directory) if verify is not None else None
            if outcome is not None and outcome.fault is not None:
                raise RunError(f"verification failed in {export.dtype}: {outcome.fault}; nothing was kept")
            report = _report(export, _files(directory, weights), source_files, outcome)
            write_json(directory / REPORT_FILE, report)
            card = model_card(report, export.target, source.model, source.recipe)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error})") from None
    return report


def _tensors(export: Export, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The exported tensors, in the order of the plan."""
    source, target = export.source, export.target
    dtype = None if export.dtype == "fp8" else NUMPY_DTYPES[export.dtype]
    quantised = fp8.quantised_tensors(target.tensors)
    for name, array in convert_state(state, source.model, target.model, dtype, str(source.path)):
        for hf_name, matrix in to_hf(name, array, target.naming):
            if dtype is None:
                yield from fp8.stored_arrays(hf_name, matrix, quantised)
            else:
                yield hf_name, matrix
            del matrix
        del array  # not to be held while the next one is read


def _write_settings(export: Export, directory: Path) -> None:
    """Configuration and tokenizer."""
    special = export.tokenizer.special if export.tokenizer is not None else None
    is_folded = export.target.model != export.source.model
    write_json(directory / "config.json", hf_config(export.target, export.dtype, special, is_folded))
    if export.tokenizer is not None:
        write_json(directory / "generation_config.json", generation_config(export.tokenizer.special))
        export.tokenizer.write(directory, export.source.model.max_position_embeddings)


def _files(directory: Path, weights: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Size and digest of every file: of the weights those that were taken while they were written."""
    names = sorted(path.name for path in directory.iterdir())
    return {name: weights[name] if name in weights else record_of(directory / name) for name in names}


def _report(
    export: Export, files: Mapping[str, FileRecord], source_files: Mapping[str, str], outcome: Outcome | None
) -> dict[str, Any]:
    """Where the export came from, what was done, what came out."""
    source, target, plan = export.source, export.target, export.plan
    kinds = dict.fromkeys(attention.kind for attention in source.model.attentions)  # two of some hybrids
    return {
        "vha_paddle": vha_paddle.__version__,
        "kind": source.kind,
        "source": {**source.provenance, "attention": " and ".join(kinds)},
        "source_files": dict(source_files),
        "left_out": dict(plan.left_out),
        "warnings": export.warnings,
        "architecture": target.stock.architecture,
        "fold": export.fold,
        "dtype": export.dtype,
        "parameters": parameters(target.model).total,
        "tensors": len(plan.targets),
        "bytes": plan.num_bytes,
        "folded": {tensor.name: list(tensor.sources) for tensor in plan.targets if len(tensor.sources) > 1},
        "kv_cache_bytes_per_token_per_layer": cache_bytes(source.model),
        "verification": outcome.figures() if outcome is not None else None,
        "files": {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in files.items()},
    }
