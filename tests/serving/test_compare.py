"""What `make serve-check` calls a breach. The clients themselves are too large for this suite."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.clients import PROCESSES
from tests.serving.compare import Found, compare, table
from tests.serving.models import MODELS
from tests.serving.run import NUM_NEW

REFERENCE = {
    "prompt": [-4.0, -8.0, -1.0],
    "greedy": [5, 6, 7],
    "greedy_logprobs": [-0.5, -0.25, -0.125],
    "text_tokens": [1, 2],
}


def found(expected: Any = "same", **changes: Any) -> Found:
    return compare("client", "model", expected, REFERENCE | changes, REFERENCE)


def test_what_is_equal_passes() -> None:
    equal = found()
    assert equal.passed and equal.outcome == "same"
    assert (equal.difference, equal.greedy_agreement, equal.num_new, equal.text_agrees) == (0.0, 3, 3, True)


@pytest.mark.parametrize(("off", "passes"), [(7.9e-5, True), (8.1e-5, False)])
def test_log_probabilities_may_differ_by_1e_5_of_the_largest(off: float, passes: bool) -> None:
    assert found(prompt=[-4.0 + off, -8.0, -1.0]).passed is passes
    assert found(greedy_logprobs=[-0.5, -0.25, -0.125 - off]).passed is passes


def test_another_greedy_token_is_a_breach_and_what_follows_it_is_not_compared() -> None:
    other = found(greedy=[5, 9, 7], greedy_logprobs=[-0.5, -7.0, -7.0])
    assert not other.passed
    assert (other.outcome, other.difference, other.greedy_agreement) == ("other model", 0.0, 1)
    assert other.cell == "0.0e+00 1/3 other model FAILED"


def test_a_refusal_is_a_breach_unless_it_is_expected() -> None:
    for expected, passes in (("same", False), ("refused", True), ("other model", False)):
        refused = compare("client", "model", expected, {"error": "no"}, REFERENCE)
        assert refused.passed is passes
        assert refused.error == "no"


def test_a_client_that_is_known_to_fail_and_does_not_is_a_breach() -> None:
    """The documentation says that it does."""
    assert not found("refused").passed
    assert not found("other model").passed
    assert found("other model", prompt=[0.0, 0.0, 0.0]).passed


def test_other_ids_of_a_text_are_a_breach_and_a_client_without_a_tokenizer_is_none() -> None:
    assert not found(text_tokens=[1]).passed
    assert found(text_tokens=None).passed


def test_the_table_has_a_row_for_each_model_and_leaves_free_what_was_not_asked() -> None:
    cells = [
        Found("one", "a", "same", "same", difference=1e-7, greedy_agreement=3, num_new=3),
        Found("one", "b", "same", "refused"),
        Found("two", "b", "refused", "refused"),
    ]
    assert table(cells).splitlines() == [
        "   one          two",
        "a  1.0e-07 3/3",
        "b  REFUSED      refused",
    ]


def test_every_client_is_asked_for_every_model_once() -> None:
    asked = [(process.client, name) for process in PROCESSES for name in process.models]
    assert len(asked) == len(set(asked))
    for client in ("transformers 5", "transformers 4", "vLLM", "llama.cpp"):
        assert {name for each, name in asked if each == client} == set(MODELS)
    assert NUM_NEW == 16
