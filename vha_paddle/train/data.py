"""The data of a run: its blend of training sets and its validation sets, opened and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vha_paddle.config import Recipe
from vha_paddle.data.fingerprint import difference
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import Part, TokenBatches, ValidationWindows, unigram_entropy
from vha_paddle.data.prefetch import Prefetched
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh


@dataclass(frozen=True)
class HeldOut:
    """A validation set."""

    windows: ValidationWindows
    unigram_entropy: float
    """Nats per token: the loss of a model that knows nothing but how often each token occurs."""


class RunData:
    """The run's tokens, opened and checked against the model before anything else starts.

    Attributes:
        batches: the training stream.
        validation: the validation sets by name; none without `data.validation`.
        eod_id: the token that ends a document, where attention keeps to documents; None elsewhere.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Open the datasets.

        Raises:
            UserError: a file is missing or damaged, or does not fit the tokenizer or the model.
        """
        data, vocab_size = recipe.data, recipe.model.vocab_size
        tokenizer = _tokenizer_of(recipe)
        self.eod_id = tokenizer.eos_id if data.document_mask else None
        parts = [
            Part(_opened(recipe, tokenizer, one.prefix), weight)
            for one, weight in zip(data.training_sets, data.whole_weights, strict=True)
        ]
        self.batches = TokenBatches(parts, data.sequence_length, data.global_batch_size, recipe.run.seed, vocab_size)
        held_out = {name: _opened(recipe, tokenizer, prefix) for name, prefix in data.validation_sets.items()}
        _refuse_same_tokens([part.indexed for part in parts], held_out.values())
        self.validation: Mapping[str, HeldOut] = {
            name: HeldOut(ValidationWindows(indexed, data.sequence_length, vocab_size), unigram_entropy(indexed))
            for name, indexed in held_out.items()
        }

    def check_ranks(self, mesh: Mesh) -> None:
        """Compare the data of all ranks, whose machines may have copies of their own. Every rank calls it, and all
        raise together.

        Raises:
            UserError: naming two ranks and the set that differs.
        """
        names = [str(part.indexed.prefix) for part in self.batches.parts]
        digests = {name: held_out.windows.digest for name, held_out in self.validation.items()}
        of_ranks = mesh.objects((self.batches.fingerprint, digests))
        first, first_validation = of_ranks[0]
        for rank, (fingerprint, validation) in enumerate(of_ranks):
            remedy = f"rank {rank} must have what rank 0 has; copy it to all machines"
            if fingerprint != first:
                raise UserError(f"data.train: {difference(first, fingerprint, names)}; {remedy}")
            if validation != first_validation:
                changed = sorted(dict(validation.items() ^ first_validation.items()))
                raise UserError(f"data.validation: {', '.join(changed)} holds other tokens; {remedy}")

    def rows_of(self, mesh: Mesh) -> Prefetched[tuple[np.ndarray, np.ndarray]]:
        """This rank's rows of each step's global batch, tokens and labels, read a step ahead."""
        own = mesh.own_rows(self.batches.global_batch_size)
        return Prefetched(lambda step: self.batches.batch(step, own.start, own.stop))

    def passes(self, num_steps: int) -> list[str]:
        """What so many steps take of each training set, a line each."""
        of_sets = self.batches.passes(num_steps * self.batches.global_batch_size)
        return [
            f"data {passes.part.indexed.prefix}: {passes.tokens:,} tokens, {passes.epochs:.2f} epochs"
            for passes in of_sets
        ]


def _tokenizer_of(recipe: Recipe) -> Tokenizer:
    path, vocab_size = Path(recipe.data.tokenizer), recipe.model.vocab_size
    if not path.exists():
        raise UserError(
            f"data.tokenizer={path}: no such file; make the data with tools/prepare_data.py "
            "(`make quickstart` does it for the quickstart) or correct its name"
        )
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size}: must be at least the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={path}; raise it"
        )
    return tokenizer


def _opened(recipe: Recipe, tokenizer: Tokenizer, prefix: str) -> IndexedTokens:
    indexed = IndexedTokens(Path(prefix), vocab_size=recipe.model.vocab_size, tokenizer_sha256=tokenizer.digest)
    eod_id = None if indexed.manifest is None else indexed.manifest.eod_id
    if eod_id not in (None, tokenizer.eos_id):
        raise UserError(
            f"data.tokenizer={recipe.data.tokenizer}: its eos_token {tokenizer.eos_token} is id {tokenizer.eos_id}, "
            f"but documents of {prefix} end with id {eod_id}; name the tokenizer that lies with the data"
        )
    if recipe.data.document_mask and eod_id is None:
        raise UserError(
            f"data.document_mask=true: {prefix}.json names no eod_id, so nothing ends the documents of {prefix}; "
            "prepare the data with one or use false"
        )
    return indexed


def _refuse_same_tokens(training: Sequence[IndexedTokens], held_out: Iterable[IndexedTokens]) -> None:
    """Whatever the paths are called: links, copies, another spelling."""
    prefixes: dict[str, Path] = {}
    for indexed in training:
        other = prefixes.setdefault(indexed.digest, indexed.prefix)
        if other is not indexed.prefix:
            raise UserError(
                f"data.train: {indexed.prefix} holds the same tokens as {other}; name one of them, with the sum of the "
                "weights"
            )
    for indexed in held_out:
        if indexed.digest in prefixes:
            raise UserError(
                f"data.validation: {indexed.prefix} holds the same tokens as the training set "
                f"{prefixes[indexed.digest]}, so its loss is of no held-out text; name another set or remove the key"
            )
