"""What is written: by itself, in a batch, and with which draws."""

from __future__ import annotations

import pytest

from tests.generate.cases import NUM_NEW, Case, continued, continued_alone
from vha_paddle.errors import UserError
from vha_paddle.generate.batch import Text, generate
from vha_paddle.generate.decoder import CachedDecoder
from vha_paddle.generate.model import TextModel
from vha_paddle.sampling import Sampling

PROMPTS = ("The quick", "dog", "def fox(dog):\n    if dog is None", "The lazy dog sleeps")


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)],
    ids=["greedy", "sampled"],
)
def test_every_text_of_a_batch_is_what_it_is_alone(case: Case, sampling: Sampling) -> None:
    """Also when texts around it end, each at another time, and one prompt is continued twice."""
    model = TextModel.load(case.directory)
    texts = [Text(model.encode(prompt)) for prompt in PROMPTS]
    texts.insert(2, Text(texts[0].prompt, sample=1))
    alone = [continued(model, [text], sampling)[0] for text in texts]
    end_ids = {alone[0][5], alone[1][9], alone[3][2]}
    together = continued(model, texts, sampling, end_ids=end_ids)
    lengths = set()
    for tokens, whole in zip(together, alone, strict=True):
        end = next((at for at, token in enumerate(whole) if token in end_ids), NUM_NEW - 1)
        assert tokens == whole[: end + 1]
        lengths.add(len(tokens))
    assert len(lengths) > 2, "texts end together: compares too little"


def test_a_text_that_has_ended_leaves_the_batch(exported: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Text(exported.encode(prompt)) for prompt in PROMPTS[:3]]
    alone = [continued(exported, [text], Sampling())[0] for text in texts]
    end_id = alone[1][3]
    lengths = [tokens.index(end_id) + 1 if end_id in tokens else NUM_NEW for tokens in alone]
    read, widths = CachedDecoder.read, []

    def counted(decoder, tokens):  # noqa: ANN001, ANN202
        widths.append(len(tokens))
        return read(decoder, tokens)

    monkeypatch.setattr(CachedDecoder, "read", counted)
    continued(exported, texts, Sampling(), end_ids=[end_id])
    assert widths == [3] + [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert min(widths) < 3


def test_a_prompt_that_is_continued_twice_is_read_once(exported: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Text(exported.encode(prompt)) for prompt in PROMPTS[:2])
    read, seen = CachedDecoder.read, []

    def recorded(decoder, tokens):  # noqa: ANN001, ANN202
        seen.append([tuple(row) for row in tokens])
        return read(decoder, tokens)

    monkeypatch.setattr(CachedDecoder, "read", recorded)
    continued(exported, [one, Text(one.prompt, 1), other, Text(one.prompt, 2)], Sampling(temperature=1.0), num_new=2)
    assert seen[0] == [one.prompt, other.prompt]
    assert len(seen[1]) == 4


def test_samples_of_a_prompt_differ_and_the_same_sample_does_not(exported: TextModel) -> None:
    prompt = exported.encode(PROMPTS[0])
    first, second, again = continued(
        exported, [Text(prompt, 0), Text(prompt, 1), Text(prompt, 0)], Sampling(temperature=1.0)
    )
    assert first == again
    assert first != second


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(exported: TextModel) -> None:
    first, again, other = (continued_alone(exported, Sampling(temperature=1.0, seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_top_k_of_1_is_greedy_at_any_temperature(exported: TextModel) -> None:
    greedy = continued_alone(exported, Sampling())
    assert continued_alone(exported, Sampling(temperature=9.0, top_k=1)) == greedy


def test_nothing_follows_an_end_token(exported: TextModel) -> None:
    tokens = continued_alone(exported, Sampling(temperature=1.0))
    end_ids = [tokens[NUM_NEW // 2], tokens[NUM_NEW // 3]]
    stopped = continued_alone(exported, Sampling(temperature=1.0), end_ids=end_ids)
    assert stopped == tokens[: min(map(tokens.index, end_ids)) + 1]


def test_tokens_come_as_they_are_chosen(exported: TextModel) -> None:
    """The first step's are there before the second step is made."""
    texts = [Text(exported.encode(prompt)) for prompt in PROMPTS[:2]]
    decoder = exported.decoder(40, 3)
    tokens = generate(decoder, texts, 3, Sampling(), ())
    assert [next(tokens)[0], next(tokens)[0]] == [0, 1]
    assert decoder.lengths_B.tolist() == [len(text.prompt) for text in texts]


def test_a_text_up_to_the_last_position_is_written_and_one_token_more_refused(exported: TextModel) -> None:
    text = Text(exported.encode(PROMPTS[3]))
    room = exported.config.max_position_embeddings - len(text.prompt)
    assert len(continued(exported, [text], Sampling(), num_new=room)[0]) == room
    with pytest.raises(UserError, match=f"max_new_tokens={room + 1} .*max_position_embeddings=64"):
        exported.decoder(len(text.prompt), room + 1)


def test_no_new_tokens_are_refused(exported: TextModel) -> None:
    with pytest.raises(UserError, match="max_new_tokens=0: must be at least 1"):
        exported.decoder(3, 0)
