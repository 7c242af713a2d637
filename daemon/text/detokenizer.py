"""Token ids to text, one at a time, for one sequence.

Owns: the bytes of a character that is not complete yet. Not here: stop strings, what bytes a token stands for.
Invariant: every delta is valid text; joined, the deltas are what decoding all ids at once gives. U+FFFD stands only for bytes that
no further token can make valid.
"""

from __future__ import annotations

import codecs

from daemon.text.tokenizer import Tokenizer


class Detokenizer:
    """`at_start` when the ids begin a text of their own (not when they continue a prompt): see `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = at_start and tokenizer.leading_space

    def push(self, token: int) -> str:
        """The text that `token` completes: "" for a control token and while a character is incomplete."""
        data = self._token_bytes(token)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the sequence: a character left incomplete becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
