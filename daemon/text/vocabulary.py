"""What a vocabulary is once it is understood, whichever file it came from.

Owns: the `Vocabulary` record that the two readers (gguf_vocab, hf_vocab) fill and `Tokenizer` works from, and the facts that both
readers share: the byte alphabet of byte-level BPE, the form of byte tokens, the spellings that end a generation, the caps.
Invariant: `encoder` cannot produce a control token, because control tokens are not in its model; markers are cut out before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers

from engine.errors import CavectlError, CorruptFile

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\u2581"  # stands for a space in vocabularies that do not spell bytes

# Tokens that end a turn or a text wherever they occur; many files name only one of several in their metadata.
END_SPELLINGS = frozenset(
    (
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<|EOT|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    )
)


@dataclass(frozen=True, slots=True)
class Marker:
    """A token matched as a spelling before any merging. `control`: only where control tokens are asked for, and without text."""

    id: int
    spelling: str
    control: bool
    lstrip: bool = False  # takes the white space before it
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    encoder: tokenizers.Tokenizer  # plain text to ids
    continued: tokenizers.Tokenizer  # the same for text that does not open the input
    markers: tuple[Marker, ...]
    token_bytes: tuple[bytes, ...]  # by id; b"" for control tokens
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    prefix: tuple[int, ...]  # ids that open an input
    suffix: tuple[int, ...]
    text_prefix: str = ""  # put before a text that opens the input or follows a marker
    leading_space: bool = False  # decoding a whole text drops one space at its start
    shrink: int = 1  # how many bytes of input one byte that reaches the model may stand for


def byte_alphabet() -> list[str]:
    """The letter of each byte value in byte-level BPE: printable Latin-1 stands for itself, the rest is counted from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(spare)) for value in range(256)]


def bytes_of_letters(tokens: Iterable[str]) -> list[bytes]:
    """Bytes of tokens spelled in the byte alphabet; a token with any other letter stands for its own UTF-8."""
    to_latin1 = {ord(letter): chr(value) for value, letter in enumerate(byte_alphabet())}
    to_latin1 |= {value: None for value in range(256) if value not in to_latin1}
    return [_letters_to_bytes(token, to_latin1) for token in tokens]


def _letters_to_bytes(token: str, to_latin1: dict[int, str | None]) -> bytes:
    if any(to_latin1.get(ord(letter)) is None for letter in token):
        return token.encode()
    return token.translate(to_latin1).encode("latin-1")


def bytes_of_marked(token: str) -> bytes:
    """Bytes of a token in a vocabulary with space marks and byte tokens."""
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()


def check_sizes(tokens: int, merges: int) -> None:
    if tokens == 0:
        raise CorruptFile("the vocabulary is empty")
    if tokens > MAX_TOKENS:
        raise CorruptFile(f"the vocabulary has {tokens} tokens, at most {MAX_TOKENS} are read")
    if merges > MAX_MERGES:
        raise CorruptFile(f"the vocabulary has {merges} merges, at most {MAX_MERGES} are read")


def check_id(name: str, value: int | None, tokens: int) -> int | None:
    if value is not None and not 0 <= value < tokens:
        raise CorruptFile(f"{name} is {value}, outside the vocabulary of {tokens} tokens")
    return value


def check_byte_tokens(tokens: Iterable[str]) -> None:
    """A vocabulary that falls back on bytes needs a token for each."""
    present = {match[1] for match in map(BYTE_TOKEN.fullmatch, tokens) if match}
    missing = next((f"{value:02X}" for value in range(256) if f"{value:02X}" not in present), None)
    if missing:
        raise CorruptFile(f"the vocabulary has no token for byte 0x{missing}")


def end_ids(tokens: Iterable[tuple[str, int]], named: Iterable[int | None]) -> frozenset[int]:
    """Ids that end a generation: those the file names and those spelled like one."""
    spelled = {token: number for token, number in tokens if token in END_SPELLINGS}
    if "<|end|>" in spelled and "<|call|>" in spelled and "<|return|>" in spelled:
        del spelled["<|end|>"]  # ends a message there, not the turn
    return frozenset(spelled.values()) | {number for number in named if number is not None}


def unsupported(what: str, hint: str = "") -> CavectlError:
    return CavectlError(what, code="unsupported_tokenizer", hint=hint)
