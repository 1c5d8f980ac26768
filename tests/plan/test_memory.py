"""Bytes of a rank: what is exact, and how many microbatches a stage keeps."""

from __future__ import annotations

import pytest

from tests.plan.recipes import GROUPED, VHA, small_recipe
from vha_paddle.config import Parallel
from vha_paddle.errors import UserError
from vha_paddle.plan import activations
from vha_paddle.plan.memory import RankMemory, all_ranks, best, rank_memory, worst
from vha_paddle.plan.schedule import schedule_of
from vha_paddle.plan.stages import owned_sizes, owned_tensors, stage_tensors


@pytest.mark.parametrize(("compute", "width", "state"), [("float32", 4, 8), ("bfloat16", 2, 12)])
def test_weights_gradients_and_optimizer_follow_from_the_parameters(compute: str, width: int, state: int) -> None:
    recipe = small_recipe(VHA, {"tensor": 2, "sharding": 2}, compute=compute)
    size = sum(tensor.size for tensor in stage_tensors(recipe.model, recipe.parallel, 0))
    for rank, owned in enumerate(owned_sizes(recipe.model, recipe.parallel, 0)):
        found = rank_memory(recipe, 0, rank)
        assert (found.parameters, found.owned) == (size, owned)
        # gradients are summed in float32, whatever the weights
        assert (found.weights, found.gradients, found.optimizer) == (width * size, 4 * size, state * owned)


def test_later_sharding_stages_divide_gradients_then_weights() -> None:
    recipe = small_recipe(VHA, {"sharding": 2})

    def at(stage: int) -> RankMemory:
        parallel = Parallel.model_validate({"sharding": 2, "sharding_stage": stage})
        return rank_memory(recipe.model_copy(update={"parallel": parallel}), 0, 1)

    first, second, third = at(1), at(2), at(3)
    tensors = stage_tensors(recipe.model, recipe.parallel, 0)
    mine = {tensor.name for tensor in owned_tensors(recipe.model, recipe.parallel, 0, 1)}
    largest = max(tensor.size for tensor in tensors)
    assert first.gradients == first.weights == second.weights == 4 * first.parameters
    assert second.gradients == third.gradients == 4 * (first.owned + largest)
    others = [tensor for tensor in tensors if tensor.name not in mine]
    ends = sum(tensor.size for tensor in others if not tensor.unit.startswith("layers"))
    blocks = [sum(tensor.size for tensor in others if tensor.unit == f"layers.{layer}") for layer in range(4)]
    assert third.weights == 4 * (first.owned + ends + max(blocks))


def test_1f1b_keeps_fewer_microbatches_on_later_stages() -> None:
    schedule = schedule_of(Parallel(pipeline=4), 8)
    assert schedule.name == "1F1B"
    assert [schedule.chunks_kept(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [schedule_of(Parallel(pipeline=4), 2).chunks_kept(stage) for stage in range(4)] == [2, 2, 2, 1]


def test_interleaving_keeps_more_and_waits_less() -> None:
    schedule = schedule_of(Parallel(pipeline=4, virtual_pipeline=2), 8)
    assert schedule.name == "interleaved 1F1B"
    assert [schedule.chunks_kept(stage) for stage in range(4)] == [11, 9, 7, 5]  # of 16 passes, half a stage each
    assert schedule.bubble == 3 / 19 < schedule_of(Parallel(pipeline=4), 8).bubble == 3 / 11


def test_as_many_microbatches_as_stages_are_all_kept() -> None:
    schedule = schedule_of(Parallel(pipeline=4, virtual_pipeline=2), 4)
    assert schedule.name == "forward then backward"
    assert [schedule.chunks_kept(stage) for stage in range(4)] == [8, 8, 8, 8]
    assert schedule.losses_kept == 4


def test_one_stage_keeps_one_microbatch_and_never_waits() -> None:
    schedule = schedule_of(Parallel(), 8)
    assert (schedule.chunks_kept(0), schedule.bubble) == (1, 0)


def test_microbatches_that_no_schedule_takes_are_refused() -> None:
    with pytest.raises(UserError, match="6 microbatches on 4 stages; there must be as many as stages or at least 8"):
        schedule_of(Parallel(pipeline=4, virtual_pipeline=2), 6)


def test_a_stage_keeps_its_layers_and_what_it_hands_on_for_every_microbatch_in_flight() -> None:
    recipe = small_recipe(VHA, {"pipeline": 4})
    layer, handed_on = activations.layer_kept(recipe), 8 * 24 * 4
    found = [rank_memory(recipe, stage, 0) for stage in range(4)]
    assert [rank.activations for rank in found] == [kept * (layer + handed_on) for kept in (4, 3, 2)] + [layer]
    assert [rank.loss > 0 for rank in found] == [False, False, False, True]


def test_the_total_counts_the_larger_of_loss_and_block() -> None:
    rank = rank_memory(small_recipe(VHA), 0, 0)
    assert rank.loss != rank.block
    fixed = rank.weights + rank.gradients + rank.optimizer + rank.activations
    assert rank.total == fixed + max(rank.loss, rank.block)


def test_worst_and_best_rank_are_found_over_stages_and_shards() -> None:
    ranks = all_ranks(small_recipe(VHA, {"pipeline": 2, "sharding": 2}))
    assert {rank.stage for rank in ranks} == {0, 1}
    assert worst(ranks).total == max(rank.total for rank in ranks) > best(ranks).total


EXPERTS = {
    "intermediate_size": None,
    "experts": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_stay_at_stage_1_among_the_ranks_that_hold_the_same(stage: int) -> None:
    degrees = {"sharding": 4, "sharding_stage": stage, "expert": 2}
    recipe = small_recipe(VHA, degrees, compute="bfloat16", model=EXPERTS)
    tensors = stage_tensors(recipe.model, recipe.parallel, 0)
    experts = sum(tensor.size for tensor in tensors if tensor.is_expert)
    dense = [tensor for tensor in tensors if not tensor.is_expert]
    assert experts == 4 * 3 * 3 * 24 * 10  # layers, experts of a rank, matrices
    for rank in range(4):
        found = rank_memory(recipe, 0, rank)
        own = owned_tensors(recipe.model, recipe.parallel, 0, rank)
        mine = {tensor.name for tensor in own if not tensor.is_expert}
        own_dense = sum(tensor.size for tensor in dense if tensor.name in mine)
        own_experts = sum(tensor.size for tensor in own if tensor.is_expert)
        assert found.optimizer == 12 * (own_dense + own_experts)
        whole = sum(tensor.size for tensor in dense)
        others = [tensor for tensor in dense if tensor.name not in mine]
        ends = sum(tensor.size for tensor in others if not tensor.unit.startswith("layers"))
        blocks = [sum(tensor.size for tensor in others if tensor.unit == f"layers.{layer}") for layer in range(4)]
        gradients = whole if stage == 1 else own_dense + max(tensor.size for tensor in dense)
        assert found.gradients == 4 * (experts + gradients)
        assert found.weights == 2 * (experts + (whole if stage < 3 else own_dense + ends + max(blocks)))


def test_a_stage_of_a_hybrid_keeps_what_each_of_its_layers_keeps() -> None:
    sliding = GROUPED | {"num_key_value_heads": 4}
    hybrid = {"sliding_window": {"window": 3, "full_every": 2, "attention": sliding}}
    recipe = small_recipe(VHA, model=hybrid)
    full, other = recipe.model.attentions[1], recipe.model.attentions[0]
    assert (full.kind, other.kind) == ("vha", "grouped")
    kept = activations.layer_kept(recipe, full) + activations.layer_kept(recipe, other)
    found = rank_memory(recipe, 0, 0)
    assert found.activations == found.activations_per_microbatch == 2 * kept
    assert activations.layer_kept(recipe, full) != activations.layer_kept(recipe, other)


def test_the_block_at_work_is_the_largest_kind_of_a_hybrid() -> None:
    wide = VHA | {"postmix_rank": 8}
    for attention, sliding in ((VHA, wide), (wide, VHA)):
        hybrid = {"sliding_window": {"window": 3, "full_every": 2, "attention": sliding}}
        recipe = small_recipe(attention, recompute="full", model=hybrid)
        blocks = [
            activations.layer_recomputed(recipe, one)
            + activations.layer_terms(recipe, one)["gate, up and their product"]
            for one in recipe.model.attentions
        ]
        assert rank_memory(recipe, 0, 0).block == max(blocks) > min(blocks)


def test_chunks_of_a_hybrid_are_counted_as_the_largest_of_them() -> None:
    hybrid = {"sliding_window": {"window": 3, "full_every": 2, "attention": GROUPED}, "num_hidden_layers": 6}
    degrees = {"pipeline": 3, "virtual_pipeline": 2}
    recipe = small_recipe(VHA, degrees, model=hybrid, data={"global_batch_size": 6})  # a sliding chunk and a full one
    kept = [activations.layer_kept(recipe, one) for one in recipe.model.attentions]
    passes = schedule_of(recipe.parallel, 6).chunks_kept(0)
    assert rank_memory(recipe, 0, 0).activations == passes * (max(kept) + 8 * 24 * 4)
    assert max(kept) > min(kept)
