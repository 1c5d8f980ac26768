"""The measures of VHA's maps: by their definitions, and what they are for maps that one can picture."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import maps as oracle
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.maps import (
    MEASURES,
    layer_figures,
    map_of,
    means_of,
    postmix_figures,
    premix_figures,
    record_of,
    summary,
)

RNG = np.random.default_rng(4)
PREMIX, A, B = RNG.standard_normal((3, 6, 6)) + np.eye(6), RNG.standard_normal((9, 2)), RNG.standard_normal((9, 2))


def test_every_measure_is_its_definition() -> None:
    found = layer_figures({"premix": PREMIX, "postmix_a": A, "postmix_b": B})
    expected = oracle.layer_figures(PREMIX, A, B)
    assert set(found) == set(expected) == set(MEASURES)
    for measure in MEASURES:
        assert_close(np.array(found[measure]), np.array(expected[measure]), FLOAT64, measure)


def test_identity_maps_have_no_distance_and_no_rank() -> None:
    figures = premix_figures(np.stack([np.eye(4)] * 2)) | postmix_figures(RNG.standard_normal((4, 2)), np.zeros((4, 2)))
    assert figures["premix_distance"] == [0, 0] and figures["premix_rank"] == [0, 0]
    assert "premix_divergence" not in figures  # of nothing
    assert figures["premix_norm"] == [2, 2]
    for measure in ("distance", "sigma_max", "rank", "off_diagonal"):
        assert figures[f"postmix_{measure}"] == 0


def test_groups_with_one_matrix_do_not_diverge_and_independent_ones_diverge_by_two() -> None:
    assert premix_figures(np.stack([PREMIX[0]] * 3))["premix_divergence"] == pytest.approx(0, abs=1e-12)
    independent = np.eye(64) + RNG.standard_normal((4, 64, 64))
    assert premix_figures(independent)["premix_divergence"] == pytest.approx(2, rel=0.05)


def test_one_group_has_nothing_to_diverge_from() -> None:
    assert "premix_divergence" not in premix_figures(PREMIX[:1])


def test_the_effective_rank_counts_equal_directions() -> None:
    basis = np.linalg.qr(RNG.standard_normal((8, 8)))[0]
    figures = postmix_figures(basis[:, :3], 5 * basis[:, 3:6])
    assert figures["postmix_rank"] == pytest.approx(3)
    assert figures["postmix_sigma_max"] == pytest.approx(5)


def test_a_premix_that_is_not_square_has_a_norm_only() -> None:
    premix = RNG.standard_normal((2, 4, 6))
    assert premix_figures(premix) == {"premix_norm": [pytest.approx(oracle.frobenius(matrix)) for matrix in premix]}


def test_only_maps_are_found_by_name() -> None:
    assert map_of("model.layers.12.self_attn.premix") == (12, "premix")
    assert map_of("model.layers.0.self_attn.postmix_b") == (0, "postmix_b")
    for name in ("model.layers.0.self_attn.q_proj.weight", "premix", "model.layers.0.self_attn.premix.moment1"):
        assert map_of(name) is None


def test_a_record_has_a_place_for_each_layer_with_maps() -> None:
    record = record_of({10: premix_figures(PREMIX), 2: postmix_figures(A, B)})
    assert record["layer"] == [2, 10]
    assert record["premix_distance"] == [None, premix_figures(PREMIX)["premix_distance"]]
    assert record["postmix_rank"] == [postmix_figures(A, B)["postmix_rank"], None]


def test_means_and_their_line_leave_out_what_is_not_there() -> None:
    record = record_of({0: premix_figures(PREMIX[:2]), 1: postmix_figures(A, B)})
    means = means_of(record)
    distances = [oracle.frobenius(matrix - np.eye(6)) for matrix in PREMIX[:2]]
    assert means["premix_distance"] == pytest.approx(sum(distances) / 2)
    assert means["premix_distance_max"] == pytest.approx(max(distances))
    assert means["postmix_rank"] == pytest.approx(oracle.effective_rank(B @ A.T))
    assert f"|W-I| {means['premix_distance']:.3f} " in summary(record)
    assert "|M-I|" not in summary(record_of({0: premix_figures(PREMIX)}))
