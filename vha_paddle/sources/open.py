"""Open a checkpoint of whatever kind, by what lies on the disk."""

from __future__ import annotations

from pathlib import Path

from vha_paddle.checkpoint.layout import MANIFEST_FILE, list_steps
from vha_paddle.errors import UserError
from vha_paddle.sources.base import Source
from vha_paddle.sources.hugging_face import is_hugging_face
from vha_paddle.sources.own import open_own
from vha_paddle.sources.unfolded import MODEL_TYPE, is_unfolded, open_unfolded
from vha_paddle.sources.upstream import GateOrder, NormOrder, open_upstream

_TENSOR_FILES = (
    "*.safetensors",
    "*.pdparams",
    *(below + name for below in ("", "*/", "*/*/") for name in ("*.metadata", "*.distcp")),
)


def open_source(
    path: Path, config: Path | None = None, norm_order: NormOrder | None = None, gate_order: GateOrder | None = None
) -> Source:
    """Open a checkpoint of this package or a run directory, an unfolded directory of it, or one of another project.

    Reads no more than it must: digests that a checkpoint states are for whoever reads its tensors to compare
    (`Source.files`).

    Args:
        config: the configuration of another project's checkpoint, or the folder whose `config.json` it is; None takes
            the one that lies with the tensors.
        norm_order, gate_order: what no file of another project's checkpoint says; see docs/upstream.md.

    Raises:
        UserError: there is nothing of the kind at `path`, it is damaged, or an argument has no effect on it.
    """
    if not path.exists():
        raise UserError(f"{path}: does not exist; give a checkpoint, a run directory or a model directory")
    given = {"--config": config, "--norm-order": norm_order, "--gate-order": gate_order}
    if (path / MANIFEST_FILE).is_file() or list_steps(path):
        _refuse(given, path, "a checkpoint of this package, whose recipe says it all")
        return open_own(path, with_digests=False)
    if is_unfolded(path):
        _refuse(given, path, "an unfolded directory of this package, whose config.json says it all")
        return open_unfolded(path)
    if is_hugging_face(path):
        raise UserError(
            f"{path}: a stock model directory, in which there is nothing to fold; serve it as it is, or make a "
            "checkpoint of it with tools/import_hf.py"
        )
    if path.is_dir() and not any(found for pattern in _TENSOR_FILES for found in path.glob(pattern)):
        raise UserError(
            f"{path}: no checkpoint: there is no {MANIFEST_FILE} and no checkpoints/step-N (of this package), no "
            f"config.json of model_type {MODEL_TYPE} (an unfolded export), and neither .safetensors, .pdparams nor "
            ".metadata with .distcp files (of other projects)"
        )
    return open_upstream(path, config, norm_order, gate_order)


def _refuse(given: dict[str, Path | NormOrder | GateOrder | None], path: Path, what: str) -> None:
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{path}: {flag}={value}: has no effect on {what}; drop it")
