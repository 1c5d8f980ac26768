"""Several texts continued together: one step of the model serves all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vha_paddle.generate.decoder import CachedDecoder
from vha_paddle.sampling import Sampling, choose_token


@dataclass(frozen=True)
class Text:
    """What is to be continued."""

    prompt: tuple[int, ...]
    sample: int = 0
    """Of the texts that continue one prompt, which: each has random draws of its own, and nothing else decides them."""


def generate(
    decoder: CachedDecoder, texts: Sequence[Text], max_new_tokens: int, sampling: Sampling, end_ids: Collection[int]
) -> Iterator[tuple[int, int]]:
    """New tokens as they are chosen, each as (number of its text, token), for a fresh decoder.

    Each text becomes what it would be alone, up to round-off. After an end token nothing follows: its text leaves the
    batch, and the others go on. A prompt that several texts continue is read once.

    Raises:
        RunError: the model's logits are not finite.
    """
    prompts = list(dict.fromkeys(text.prompt for text in texts))
    logits_BV = decoder.read(prompts)
    rows = [prompts.index(text.prompt) for text in texts]
    if rows != list(range(len(prompts))):
        decoder.select(rows)
        logits_BV = logits_BV[rows]
    generators = [np.random.Generator(np.random.Philox(sampling.seed).jumped(text.sample)) for text in texts]
    running = list(range(len(texts)))
    for left in reversed(range(max_new_tokens)):
        tokens = [
            choose_token(logits_V, sampling, generators[text])
            for logits_V, text in zip(logits_BV, running, strict=True)
        ]
        yield from zip(running, tokens, strict=True)
        going = [row for row, token in enumerate(tokens) if token not in end_ids]
        if left == 0 or not going:
            return
        if len(going) < len(running):
            decoder.select(going)
            running = [running[row] for row in going]
        logits_BV = decoder.read([[tokens[row]] for row in going])
