"""The text of every file that `tools/make_recipes.py` writes."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import get_args

from tools.recipe_book import keys
from tools.recipe_book.cells import Cell, cells
from tools.recipe_book.values import LINE, Origin, origins, plain, to_yaml
from vha_paddle.config import Recipe, recipe_from_dict
from vha_paddle.counts import active_parameters, kv_cache_bytes, parameters
from vha_paddle.errors import UserError
from vha_paddle.export.stock import stock_class
from vha_paddle.fold import check_foldable

START, END = "<!-- tables: written by tools/make_recipes.py -->\n", "<!-- end of the tables -->\n"
_GPUS_PER_NODE = 8


def files(root: Path) -> dict[str, str]:
    """Every file by its path below `root`; of the two pages only what is between the marks is replaced."""
    written = {f"recipes/{cell.file}.yaml": recipe_text(cell) for group in cells().values() for cell in group}
    for page, tables in {"recipes/README.md": _tables(), "docs/recipes.md": keys.tables()}.items():
        before, _, rest = (root / page).read_text(encoding="utf-8").partition(START)
        _, _, after = rest.partition(END)
        written[page] = before + START + tables + END + after
    return written


def recipe_text(cell: Cell) -> str:
    """One recipe file."""
    recipe = _checked(cell)
    active, total = active_parameters(recipe.model), parameters(recipe.model).total
    of_them = f", {active:,} of them active" if active != total else ""
    size = f"{total:,} parameters{of_them}; {_cache(recipe)} of cache per token and layer in bfloat16."
    nodes, tokens = recipe.num_ranks // _GPUS_PER_NODE, recipe.schedule.total_tokens
    return f"""\
# yaml-language-server: $schema=recipe.schema.json
# {cell.variant} at {cell.scale.label}: {tokens / 1e9:.3g}B tokens in sequences of {recipe.data.sequence_length:,}.
# Cell: {cell.where}.
{textwrap.fill(size, LINE, initial_indent="# ", subsequent_indent="# ")}
# Behind each value is its origin: paper; upstream, the public research configs; derived from others; assumed where it
# is unknown (see README.md). On each of {nodes} nodes of {_GPUS_PER_NODE} GPUs, and small on any machine:
#   python -m paddle.distributed.launch --nnodes {nodes} --rank RANK --master ADDRESS:PORT \\
#     --nproc_per_node {_GPUS_PER_NODE} tools/train.py recipes/{cell.file}.yaml
#   python tools/train.py recipes/{cell.file}.yaml --reduced

{to_yaml(cell.values)}"""


def _checked(cell: Cell) -> Recipe:
    """The recipe, once it is known to keep every rule."""
    return recipe_from_dict({name: plain(section) for name, section in cell.values.items()}, source=cell.file)


def _cache(recipe: Recipe) -> str:
    """Bytes that a layer keeps of a token, for full and for sliding layers where these differ."""
    model = recipe.model
    full, window = kv_cache_bytes(model.attention, "bfloat16"), model.sliding_window
    if window is None:
        return f"{full:,} B"
    sliding = kv_cache_bytes(window.attention or model.attention, "bfloat16")
    return f"{full:,} B (full layers), {sliding:,} B (sliding, last {window.window:,} tokens)"


def _served(recipe: Recipe) -> str:
    """What becomes of a checkpoint."""
    model = recipe.model
    try:
        check_foldable(model, "")
    except UserError:
        return "does not fold"
    try:
        stock_class(model, "")
    except UserError:
        return "folds, no stock class" if model.has_maps else "no stock class"
    return "folds" if model.has_maps else "plain"


def _tables() -> str:
    """A table for each group of recipes."""
    return "\n".join(f"### {heading}\n\n{_table(group)}" for heading, group in cells().items())


def _table(group: list[Cell]) -> str:
    rows = [
        "| recipe | cell | tokens | GPUs | parameters | cache | served | origins |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in group:
        recipe = _checked(cell)
        active, total = active_parameters(recipe.model), parameters(recipe.model).total
        of_them = f", {active / 1e9:.2f} B active" if active != total else ""
        found = Counter(origin for section in cell.values.values() for origin in origins(section))
        columns = [
            f"[{cell.file}]({cell.file}.yaml)",
            cell.where,
            f"{recipe.schedule.total_tokens / 1e9:.3g}B at {recipe.data.sequence_length:,}",
            str(recipe.num_ranks),
            f"{total / 1e6:,.3f} M{of_them}",
            _cache(recipe),
            _served(recipe),
            " / ".join(str(found[origin]) for origin in get_args(Origin)),
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"
