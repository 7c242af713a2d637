"""Text to token ids and back, for one model.

Owns: `Tokenizer`, its threads and its cache of encoded pieces, and `load_tokenizer`. Not here: what a vocabulary file means
(gguf_vocab, hf_vocab), rendering a chat (chat_template), streaming (detokenizer).
A text is first cut at its markers (control and user-defined tokens), then what lies between is encoded. Control tokens are cut
out only of text marked `special`; plain text next to it joins it, so a user's "<s>" is encoded like any characters at that place.
Invariant: text that is not `special` never yields a control token.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel

from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.hf_vocab import read_tokenizer_folder
from daemon.text.vocabulary import Vocabulary, unsupported
from engine.errors import ContextLengthExceeded
from engine.types import ModelInfo

T = TypeVar("T")
CACHED_LETTERS = 2_000_000  # of text whose ids are kept, per model


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a prompt; `special` says that spellings of control tokens in it are those tokens."""

    text: str
    special: bool


class EncoderThreads:
    """Where texts are encoded: two threads, so that long prompts leave a core to the streams. One for all models of a daemon."""

    def __init__(self, limit: int = 2) -> None:
        self._pool = ThreadPoolExecutor(limit, thread_name_prefix="encode")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary, threads: EncoderThreads | None = None) -> None:
        self._vocabulary = vocabulary
        self._threads = threads or EncoderThreads()
        self._cache = _EncodedPieces(CACHED_LETTERS)
        self._cutters = {special: _Cutter(vocabulary, control=special) for special in (False, True)}
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.vocab_size = len(vocabulary.token_bytes)
        self.leading_space = vocabulary.leading_space
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {marker.spelling: marker.id for marker in vocabulary.markers if marker.control}
        )
        self.bos_token = self._spelling(vocabulary.bos_id)
        self.eos_token = self._spelling(vocabulary.eos_id)
        spellings = (len(marker.spelling.encode()) for marker in vocabulary.markers)
        self.max_token_bytes = vocabulary.shrink * max(*map(len, vocabulary.token_bytes), *spellings, 1)

    def _spelling(self, token: int | None) -> str:
        """How a template writes a control token, "" for none."""
        return next((spelling for spelling, number in self.special_tokens.items() if number == token), "")

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.encode_pieces([Piece(text, parse_special)], add_special)

    def encode_pieces(self, pieces: Sequence[Piece], add_special: bool) -> list[int]:
        """`add_special` opens and closes the input as the model wants it, and never doubles what is there already.

        A rendered chat is encoded with it as well: the result has exactly one BOS whether or not the template prints one.
        """
        segments = self._segments(pieces)
        ids = self._encode_segments(segments)
        if not add_special:
            return ids
        prefix, suffix = self._vocabulary.prefix, self._vocabulary.suffix
        if prefix and tuple(ids[: len(prefix)]) != prefix:
            ids[:0] = prefix
        if suffix and tuple(ids[-len(suffix) :]) != suffix:
            ids.extend(suffix)
        return ids

    async def encode_async(self, pieces: Sequence[Piece], *, add_special: bool) -> list[int]:
        """`encode_pieces` on a thread; the interpreter lock is free while a long text is merged."""
        return await self._threads.run(lambda: self.encode_pieces(pieces, add_special))

    def refuse_if_hopeless(self, text_bytes: int, context_tokens: int) -> None:
        """Raise `context_length_exceeded` for a text that cannot fit even if every token were the longest one."""
        least = -(-text_bytes // self.max_token_bytes)
        if least > context_tokens:
            raise ContextLengthExceeded(prompt_tokens=least, context_tokens=context_tokens, at_least=True)

    def token_bytes(self, token: int) -> bytes:
        """b"" for control tokens and for ids past the vocabulary (a model's head may be padded)."""
        return self._vocabulary.token_bytes[token] if token < self.vocab_size else b""

    def decode(self, ids: Iterable[int], *, at_start: bool = False) -> str:
        """The text of `ids`; `at_start` when they are a whole text: some vocabularies put a space before it, which is dropped."""
        data = b"".join(map(self.token_bytes, ids))
        if at_start and self.leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _segments(self, pieces: Sequence[Piece]) -> list[int | str]:
        segments: list[int | str] = []
        for piece in pieces:
            for part in self._cutters[piece.special].cut(piece.text):
                if isinstance(part, str) and segments and isinstance(segments[-1], str):
                    segments[-1] += part
                else:
                    segments.append(part)
        return segments

    def _encode_segments(self, segments: list[int | str]) -> list[int]:
        texts = {(segment, number == 0): None for number, segment in enumerate(segments) if isinstance(segment, str)}
        encoded = {key: ids for key in texts if (ids := self._cache.get(key)) is not None}
        for opens in (True, False):
            missing = [text for text, first in texts if first is opens and (text, first) not in encoded]
            for text, ids in zip(missing, self._encode_texts(missing, opens), strict=True):
                encoded[text, opens] = ids
                self._cache.put((text, opens), ids)
        result: list[int] = []
        for number, segment in enumerate(segments):
            if isinstance(segment, int):
                result.append(segment)
            else:
                result.extend(encoded[segment, number == 0])
        return result

    def _encode_texts(self, texts: list[str], opens: bool) -> list[array[int]]:
        if not texts:
            return []
        encoder = self._vocabulary.encoder if opens else self._vocabulary.continued
        prefix = self._vocabulary.text_prefix
        batch = encoder.encode_batch_fast([prefix + text for text in texts], add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in batch]


class _Cutter:
    """Cuts text at the spellings of markers, the longest first. The search runs outside of the interpreter lock."""

    def __init__(self, vocabulary: Vocabulary, *, control: bool) -> None:
        markers = [marker for marker in vocabulary.markers if control or not marker.control]
        rest = "\0rest"
        self._ids = [-1, *(marker.id for marker in markers)]
        self._finder = tokenizers.Tokenizer(WordLevel({rest: 0}, unk_token=rest))
        self._finder.add_tokens(
            [
                AddedToken(
                    marker.spelling,
                    single_word=marker.single_word,
                    lstrip=marker.lstrip,
                    rstrip=marker.rstrip,
                    normalized=False,
                )
                for marker in markers
            ]
        )

    def cut(self, text: str) -> list[int | str]:
        if len(self._ids) == 1:
            return [text] if text else []
        [found] = self._finder.encode_batch([text], add_special_tokens=False)
        return [
            self._ids[number] if number else text[start:end] for number, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]


class _EncodedPieces:
    """The ids of texts seen lately, so that the next turn of a chat encodes only what is new. Bounded by letters, oldest out."""

    def __init__(self, letters: int) -> None:
        self._room = letters
        self._entries: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, bool]) -> array[int] | None:
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: tuple[str, bool], ids: array[int]) -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._room -= len(key[0])
            while self._room < 0:
                old, _ = self._entries.popitem(last=False)
                self._room += len(old[0])


def load_tokenizer(
    weights: Path, info: ModelInfo, threads: EncoderThreads | None = None, *, pre_tokenizer: str | None = None
) -> Tokenizer:
    """The tokenizer of a model: of the GGUF's own vocabulary, else of tokenizer.json beside the weights. Takes up to seconds."""
    if info.vocabulary is not None:
        vocabulary = read_gguf_vocabulary(info.vocabulary, model_name=info.name, pre_tokenizer=pre_tokenizer)
    elif info.format == "safetensors":
        vocabulary = read_tokenizer_folder(weights if weights.is_dir() else weights.parent, info.config)
    else:
        raise unsupported("the file holds no vocabulary", hint="use a GGUF file with tokenizer.ggml.* metadata")
    return Tokenizer(vocabulary, threads)
