"""A packed sequence is its documents: logits, losses and gradients of every attention kind are those of each alone."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES, Case, batches, starting_weights
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.mesh import Mesh

PACKED = [case for case in CASES if case.eod_id is not None and case.layers == 2]


def built(case: Case) -> Decoder:
    recipe = case.recipe()
    config = recipe.model.model_copy(update={"hidden_dropout": 0.0})  # a function of the position
    model = build_decoder(config, Mesh(), seed=0, dtype="float64", memory=recipe.memory)
    weights = starting_weights(case)
    for name, parameter in model.named_tensors().items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    return model


def documents_of(case: Case) -> list[tuple[int, slice]]:
    """Row and positions of each document, cut after each end-of-document token."""
    tokens_BS, _ = next(batches(case))
    found = []
    for row, tokens_S in enumerate(tokens_BS.tolist()):
        start = 0
        for position, token in enumerate(tokens_S):
            if token == case.eod_id or position == len(tokens_S) - 1:
                found.append((row, slice(start, position + 1)))
                start = position + 1
    return found


def gradients(model: Decoder) -> dict[str, np.ndarray]:
    return {name: parameter.grad.numpy() for name, parameter in model.named_tensors().items()}


def test_the_sequences_hold_several_documents_and_whole_ones() -> None:
    documents = documents_of(PACKED[0])
    rows = [row for row, _ in documents]
    assert len(documents) > 2 * len(set(rows))
    assert max(positions.stop - positions.start for _, positions in documents) > 4


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_logits_losses_and_gradients_are_those_of_the_documents_alone(case: Case) -> None:
    tokens_BS, labels_BS = next(batches(case))
    packed, alone = built(case), built(case)
    (microbatch,) = microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh(), case.eod_id)
    packed.context.enter(microbatch)
    logits_BSV = packed(microbatch.tokens_BS).numpy()
    losses_B = packed.sequence_losses([microbatch])
    total = packed.forward_backward([microbatch], 0.5)

    expected_BSV, expected_B, expected = np.zeros_like(logits_BSV), np.zeros_like(losses_B), 0.0
    for row, positions in documents_of(case):
        tokens_1S, labels_1S = tokens_BS[row : row + 1, positions], labels_BS[row : row + 1, positions]
        expected_BSV[row, positions] = alone(paddle.to_tensor(tokens_1S)).numpy()[0]
        loss = alone.forward_backward(microbatches_of(tokens_1S, labels_1S, 0, 1, Mesh()), 0.5)
        expected_B[row] += loss
        expected += loss
    assert_close(logits_BSV, expected_BSV, FLOAT64, "logits")
    assert_close(losses_B, expected_B, FLOAT64, "losses")
    assert_close(np.array(total), np.array(expected), FLOAT64, "loss")
    for name, gradient in gradients(alone).items():
        assert_close(gradients(packed)[name], gradient, FLOAT64, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_microbatch_has_the_starts_of_its_own_rows_and_positions(rank: int) -> None:
    tokens_BS = np.random.default_rng(0).integers(0, 4, (6, 8))
    mesh = Mesh(context_rank=rank, context_degree=2)
    positions = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    starts = [microbatch.starts_BS for microbatch in microbatches_of(tokens_BS, tokens_BS, 0, 2, mesh, eod_id=0)]
    expected = [[max([0, *np.flatnonzero(row[:position] == 0) + 1]) for position in positions] for row in tokens_BS]
    assert np.array_equal(np.stack(starts), np.reshape(expected, (3, 2, 4)))


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_documents_do_attend_to_each_other_without_a_mask(case: Case) -> None:
    tokens_BS, labels_BS = next(batches(case))
    model = built(case)
    plain, masked = (
        model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, 8, Mesh(), eod_id)) for eod_id in (None, 0)
    )
    assert np.abs(masked - plain).max() > 1e-3
    # the tokens alone, after a microbatch with documents, have no mask
    logits_BSV = model(paddle.to_tensor(tokens_BS)).numpy()
    at_label = np.take_along_axis(logits_BSV, labels_BS[..., None], -1)[..., 0]
    assert_close((np.log(np.exp(logits_BSV).sum(-1)) - at_label).sum(-1), plain, FLOAT64, "losses")
