"""Text out of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence

from vha_paddle.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Text of the tokens that follow a prompt, in whole characters, though some tokens are single bytes of one.

    What `push` and `finish` return, joined, is what the prompt's decoded text is continued with. Tokens are decoded
    with those before them: some tokenizers (Llama's) write the space of a word only where a word is before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = [token for token in prompt if token < tokenizer.vocab_size]
        self._num_context = len(self._tokens)
        self._emitted = len(tokenizer.decode(self._tokens))  # characters of their text that need no writing any more

    def push(self, token: int) -> str:
        """The text that is settled by this token; ids that the tokenizer does not know have none."""
        if token < self._tokenizer.vocab_size:
            self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        # Each byte of a character that may still be completed shows as one replacement character; where tokenizers
        # decode a run of bytes as a whole (Llama's), so does each byte of the characters before it.
        unsettled = len(text) - len(text.rstrip(_REPLACEMENT))
        settled = text[self._emitted : len(text) - unsettled]
        self._emitted += len(settled)
        if settled and unsettled == 0:
            # What has just been settled starts and ends with whole characters: context enough for what follows.
            self._tokens = self._tokens[self._num_context :]
            self._num_context = len(self._tokens)
            self._emitted = len(self._tokenizer.decode(self._tokens))
        return settled

    def finish(self) -> str:
        """What is left at the end: bytes of a character that was never completed."""
        return self._tokenizer.decode(self._tokens)[self._emitted :]
