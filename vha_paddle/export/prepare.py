"""What is to be made of a checkpoint, decided before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vha_paddle.config import Attention, Model, VirtualHeadAttention
from vha_paddle.errors import UserError
from vha_paddle.export import fp8
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.output import REPORT_FILE
from vha_paddle.export.plan import NUMPY_DTYPES, Plan, PlannedTensor, make_plan, planned_tensors
from vha_paddle.export.readers import NO_TOKENIZER, reader_notes
from vha_paddle.export.stock import Target, partial_target, stock_target, unfolded_target
from vha_paddle.export.tokenizer import TokenizerExport
from vha_paddle.fold import check_foldable
from vha_paddle.sources.base import Source
from vha_paddle.sources.open import open_source
from vha_paddle.sources.unfolded import is_unfolded
from vha_paddle.sources.upstream import GateOrder, NormOrder
from vha_paddle.sources.wrong_fold import fold_despite_gate

Fold = Literal["all", "partial", "none"]
"""All maps, into a stock class; those that fold, or none, into a directory of our own class."""


@dataclass(frozen=True)
class Export:
    """A checkpoint and what is to be made of it: all checked that can be without reading the weights."""

    source: Source
    target: Target
    fold: Fold
    dtype: ExportDtype
    tokenizer: TokenizerExport | None
    plan: Plan

    @property
    def warnings(self) -> list[str]:
        """What the reader had to assume, what is not there, and what other programs make of it."""
        missing = [NO_TOKENIZER] if self.tokenizer is None else []
        return [*self.source.warnings, *missing, *reader_notes(self.target, self.dtype)]


def open_for_export(
    path: Path, config: Path | None = None, norm_order: NormOrder | None = None, gate_order: GateOrder | None = None
) -> Source:
    """`sources.open.open_source`, which see for the arguments; refuses what this program has folded already.

    Raises:
        UserError: as there.
    """
    if (path / REPORT_FILE).is_file() and not is_unfolded(path):
        raise UserError(f"{path}: is an export, folded already; give the checkpoint it came from")
    return open_source(path, config, norm_order, gate_order)


def prepare_export(
    source: Source,
    dtype: ExportDtype,
    *,
    fold: Fold = "all",
    plain: bool = False,
    tokenizer: Path | None = None,
) -> Export:
    """Decide what is made of a checkpoint; reads a tensor only to say what a fold that is refused would have cost.

    Args:
        dtype: of the exported tensors; of fp8 that of the layers' matrices.
        plain: whether a model without Premix and Postmix is meant, which is exported as it is.
        tokenizer: in the place of the checkpoint's, or where it has none.

    Raises:
        UserError: a model that no stock class computes or whose maps do not fold, one whose kind does not go with
            `plain`, or a tokenizer that does not convert or has more ids than the model.
    """
    target = _target(source, fold, plain)
    if dtype == "fp8":
        _check_fp8(target, str(source.path))
    source = replace(source, tokenizer=tokenizer or source.tokenizer)
    path = source.tokenizer
    exported = TokenizerExport(path) if path is not None else None
    if exported is not None and exported.special.vocab_size > source.model.vocab_size:
        raise UserError(
            f"{path}: {exported.special.vocab_size} ids, more than model.vocab_size={source.model.vocab_size}; the "
            "tokenizer belongs to another model"
        )
    plan = make_plan(source.weights, _planned(source.model, target, dtype))
    return Export(source, target, fold, dtype, exported, plan)


def _target(source: Source, fold: Fold, plain: bool) -> Target:
    model, where = source.model, str(source.path)
    if fold == "none":
        return unfolded_target(model, where)
    if fold == "partial":
        return partial_target(model, where)
    try:
        target = stock_target(model, where)
        check_foldable(model, where)
    except UserError as error:
        if any(_gate_follows_postmix(attention) for attention in model.attentions):
            raise UserError(f"{error}; {fold_despite_gate(source.weights, model)}") from None
        raise
    if not model.has_maps and not plain:
        raise UserError(
            f"{where}: model.attention.kind={model.attention.kind} is plain already, nothing to fold; "
            "add --plain to export it as it is"
        )
    if model.has_maps and plain:
        raise UserError(
            f"{where}: layers of kind=vha hold Premix and Postmix, which no stock model does; drop --plain to fold them"
        )
    return target


def _gate_follows_postmix(attention: Attention) -> bool:
    """The one obstacle that a checkpoint of another program may have by its rules, not by anyone's choice."""
    return (
        isinstance(attention, VirtualHeadAttention)
        and attention.postmix == "linear"
        and attention.output_gate == "after_postmix"
    )


def _planned(model: Model, target: Target, dtype: ExportDtype) -> list[PlannedTensor]:
    if dtype != "fp8":
        return planned_tensors(model, target, NUMPY_DTYPES[dtype])
    quantised = fp8.quantised_tensors(target.tensors)
    return [
        PlannedTensor(name, tensor.sources, shape, stored_dtype)
        for tensor in planned_tensors(model, target, fp8.BESIDE)
        for name, (stored_dtype, shape) in fp8.stored_tensors(tensor.name, tensor.shape, quantised).items()
    ]


def _check_fp8(target: Target, where: str) -> None:
    if not target.is_stock:
        raise UserError(
            f"{where}: fp8 is for what a stock class computes, and this directory would be of our own class; choose "
            "float32 or bfloat16"
        )
    if not fp8.quantised_tensors(target.tensors):
        hidden_size, edges = target.model.hidden_size, fp8.broken_edges(target.tensors)
        sizes = f"hidden_size={hidden_size} is" if hidden_size in edges else f"{', '.join(map(str, edges))} are"
        raise UserError(
            f"{where}: {sizes} no multiple of {fp8.BLOCK}, so that no projection consists of whole blocks of "
            f"{fp8.BLOCK} x {fp8.BLOCK} and fp8 would quantise nothing; choose bfloat16"
        )
