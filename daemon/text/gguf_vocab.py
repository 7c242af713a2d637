"""GGUF vocabularies (`tokenizer.ggml.*`) turned into a `Vocabulary`.

Owns: the three kinds that are understood (`gpt2`: byte-level BPE; `llama`: BPE by score with byte fallback; `gemma4`: BPE by rank
with byte fallback) and the checks of S10. Any other kind is refused by name. Not here: reading the file, encoding.
Invariant: ids are llama.cpp's for the same file, except that text never becomes a control token (types 2 and 3, and what ends a
text), not even where merges would allow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from daemon.text.pre_tokenizers import WordSplit, word_split
from daemon.text.vocabulary import (
    BYTE_TOKEN,
    END_SPELLINGS,
    SPACE_MARK,
    Marker,
    Vocabulary,
    bytes_of_letters,
    bytes_of_marked,
    check_byte_tokens,
    check_id,
    check_sizes,
    end_ids,
    unsupported,
)
from engine.errors import CorruptFile
from engine.types import GgufVocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def read_gguf_vocabulary(source: GgufVocabulary, *, model_name: str = "", pre_tokenizer: str | None = None) -> Vocabulary:
    """`pre_tokenizer` stands in for a name that is missing or unknown. Raises `corrupt_file`, or `unsupported_tokenizer` with it.

    `model_name` matters for one family: GGUF does not say that Phi-3's markers take the white space after them.
    """
    _check(source)
    control = _control_ids(source)
    add_bos = source.model == "llama"
    match source.model:
        case "gpt2":
            split = word_split(source.pre, pre_tokenizer)
            add_bos = split.add_bos
            encoder = _byte_level(source, control, split)
            token_bytes = bytes_of_letters(source.tokens)
        case "gemma4":
            encoder = _with_byte_fallback(source, control, _plain_merges(source, control), word_split("gemma4").build())
            token_bytes = [bytes_of_marked(token) for token in source.tokens]
        case "llama":
            encoder = _with_byte_fallback(source, control, _merges_by_score(source, control), None)
            token_bytes = [bytes_of_marked(token) for token in source.tokens]
        case _:
            hint = "BPE (gpt2, gemma4) and llama vocabularies are"
            raise unsupported(f'tokenizer model "{source.model}" is not supported', hint)
    markers = tuple(_markers(source, control, rstrip=re.search("phi-?3", model_name.lower()) is not None))
    for marker in markers:
        token_bytes[marker.id] = b"" if marker.control else marker.spelling.encode()
    return _assemble(source, encoder, token_bytes, markers, add_bos=add_bos if source.add_bos is None else source.add_bos)


def _assemble(
    source: GgufVocabulary, encoder: Tokenizer, token_bytes: list[bytes], markers: tuple[Marker, ...], *, add_bos: bool
) -> Vocabulary:
    is_llama = source.model == "llama"
    bos_id = 1 if source.bos_id is None and is_llama else source.bos_id
    eos_id = 2 if source.eos_id is None and is_llama else source.eos_id
    space_prefix = is_llama if source.add_space_prefix is None else source.add_space_prefix
    spelled = ((marker.spelling, marker.id) for marker in markers if marker.control)
    return Vocabulary(
        encoder=encoder,
        continued=encoder,
        markers=markers,
        token_bytes=tuple(token_bytes),
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=end_ids(spelled, (eos_id, source.eot_id, source.eom_id)),
        prefix=(bos_id,) if add_bos and bos_id is not None else (),
        suffix=(eos_id,) if source.add_eos and eos_id is not None else (),
        text_prefix=" " if space_prefix else "",
        leading_space=space_prefix,
    )


def _markers(source: GgufVocabulary, control: set[int], *, rstrip: bool) -> Iterator[Marker]:
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    for number, token in enumerate(source.tokens):
        if token and (number in control or _type(source, number) == USER_DEFINED):
            yield Marker(number, token, number in control, rstrip=rstrip and token not in keeps_space)


def _type(source: GgufVocabulary, number: int) -> int:
    return source.token_types[number] if source.token_types else NORMAL


def _control_ids(source: GgufVocabulary) -> set[int]:
    """Tokens that text must not become: typed control or unknown, spelled like an end, or named as one by the file."""
    named = {source.bos_id, source.eos_id, source.eot_id, source.eom_id}
    return {
        number
        for number, token in enumerate(source.tokens)
        if _type(source, number) in (UNKNOWN, CONTROL)
        or token in END_SPELLINGS
        or (number in named and (_type(source, number) == USER_DEFINED or not source.token_types))
    }


def _check(source: GgufVocabulary) -> None:
    """S10: sizes, array lengths, distinct tokens, the form of byte tokens, ids in range."""
    count = len(source.tokens)
    check_sizes(count, len(source.merges))
    for name, values in (("scores", source.scores), ("token types", source.token_types)):
        if values and len(values) != count:
            raise CorruptFile(f"the vocabulary has {count} tokens and {len(values)} {name}")
    if len(set(source.tokens)) + source.tokens.count("") - ("" in source.tokens) != count:
        raise CorruptFile("the vocabulary has the same token twice")
    for number, kind in enumerate(source.token_types):
        if kind == BYTE and not BYTE_TOKEN.fullmatch(source.tokens[number]):
            raise CorruptFile(f"byte token {number} is spelled {source.tokens[number][:20]!r}, not <0x00> to <0xFF>")
    for name in ("bos", "eos", "unk", "pad", "eot", "eom"):
        check_id(f"{name}_token_id", getattr(source, f"{name}_id"), count)


def _vocab(source: GgufVocabulary, control: set[int]) -> dict[str, int]:
    return {token: number for number, token in enumerate(source.tokens) if token and number not in control}


def _byte_level(source: GgufVocabulary, control: set[int], split: WordSplit) -> Tokenizer:
    encoder = Tokenizer(BPE(_vocab(source, control), _plain_merges(source, control), ignore_merges=split.ignore_merges))
    encoder.pre_tokenizer = split.build()
    return encoder


def _with_byte_fallback(
    source: GgufVocabulary, control: set[int], merges: list[tuple[str, str]], pre_tokenizer: PreTokenizer | None
) -> Tokenizer:
    check_byte_tokens(source.tokens)
    encoder = Tokenizer(BPE(_vocab(source, control), merges, byte_fallback=True, fuse_unk=True))
    encoder.normalizer = normalizers.Replace(" ", SPACE_MARK)
    if pre_tokenizer is not None:
        encoder.pre_tokenizer = pre_tokenizer
    return encoder


def _plain_merges(source: GgufVocabulary, control: set[int]) -> list[tuple[str, str]]:
    """The merges of the file, less those that would make a control token."""
    known = {token: number not in control for number, token in enumerate(source.tokens)}
    pairs: list[tuple[str, str]] = []
    for rank, merge in enumerate(source.merges):
        cut = merge.find(" ", 1)  # a token may begin with a space, so the first letter is not looked at
        left, right = merge[:cut], merge[cut + 1 :]
        if left not in known or right not in known or left + right not in known:
            raise CorruptFile(f"merge {rank} refers to a token that is not in the vocabulary")
        if known[left] and known[right] and known[left + right]:
            pairs.append((left, right))
    if not pairs:
        raise CorruptFile("the vocabulary has no merges")
    return pairs


def _merges_by_score(source: GgufVocabulary, control: set[int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the highest score first: what joining by score does, as ranks."""
    if not source.scores:
        raise CorruptFile("a llama vocabulary needs scores")
    bytes_or_control = control | {number for number, kind in enumerate(source.token_types) if kind == BYTE}
    vocab = _vocab(source, bytes_or_control)
    order = sorted(vocab, key=lambda token: -source.scores[vocab[token]])
    return list(chain.from_iterable(_splits(token, vocab) for token in order))


def _splits(token: str, vocab: dict[str, int]) -> Sequence[tuple[str, str]]:
    pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return [(left, right) for left, right in pairs if left in vocab and right in vocab]
