"""The weights that a new run starts from, where its recipe names some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import paddle

from vha_paddle.checkpoint.layout import Checkpoint, sha256_of
from vha_paddle.checkpoint.load import load_masters, load_parameters, open_together
from vha_paddle.checkpoint.save import OptimizerState
from vha_paddle.config import Recipe
from vha_paddle.data.tokenizer_files import tokenizer_files
from vha_paddle.errors import UserError
from vha_paddle.parallel.agreement import together
from vha_paddle.parallel.mesh import Mesh


def start_from(
    recipe: Recipe, parameters: Mapping[str, paddle.Tensor], optimizer: OptimizerState, mesh: Mesh
) -> Checkpoint | None:
    """Fill the model with the weights of `run.start_from`, each rank its own slices; every rank calls it.

    Returns:
        The checkpoint that they came from, or None where the recipe names none.

    Raises:
        UserError: there is no checkpoint, it is damaged, a tensor has another shape than the model's, or its token
            ids mean other text.
    """
    if recipe.run.start_from is None:
        return None
    try:
        checkpoint = open_together(Path(recipe.run.start_from), mesh)
        with together(mesh):
            _check_tokenizer(checkpoint, Path(recipe.data.tokenizer))
        load_parameters(parameters, checkpoint.model_tensors(), mesh)
        load_masters(optimizer, checkpoint, mesh)
    except UserError as error:
        raise UserError(f"run.start_from={recipe.run.start_from}: {error}") from None
    return checkpoint


def _check_tokenizer(checkpoint: Checkpoint, tokenizer: Path) -> None:
    if sha256_of(tokenizer_files(tokenizer)[0]) != checkpoint.files[checkpoint.tokenizer_path.name].sha256:
        raise UserError(
            f"its tokenizer differs from data.tokenizer={tokenizer}, so the same ids mean other text; prepare the data "
            f"with {checkpoint.tokenizer_path}"
        )
