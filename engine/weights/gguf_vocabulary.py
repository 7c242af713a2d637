"""Reads `tokenizer.ggml.*` of a GGUF file into a GgufVocabulary.

Owned here: that lists have the lengths and ids the ranges they must have (S10). Not here: understanding any of it, which is the
daemon's (daemon/text). Invariant: ids are indices into `tokens`; `scores` and `token_types` are empty or as long as `tokens`.
"""

from __future__ import annotations

import math

from engine.types import GgufVocabulary
from engine.weights.gguf import GgufFile

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARACTERS = 4096
_TOKEN_TYPES = range(7)

_PREFIX = "tokenizer.ggml."


def read_vocabulary(file: GgufFile) -> GgufVocabulary | None:
    """None when the file has no vocabulary. Raises CorruptFile naming the key that is wrong."""
    tokens = file.array(_PREFIX + "tokens", "string")
    if tokens is None:
        return None
    _check_tokens(file, tokens)
    return GgufVocabulary(
        model=file.scalar(_PREFIX + "model", str) or "",
        pre=file.scalar(_PREFIX + "pre", str) or "",
        tokens=tokens,
        scores=_scores(file, len(tokens)),
        token_types=_token_types(file, len(tokens)),
        merges=_merges(file),
        bos_id=_token_id(file, "bos_token_id", len(tokens)),
        eos_id=_token_id(file, "eos_token_id", len(tokens)),
        unk_id=_token_id(file, "unknown_token_id", len(tokens)),
        pad_id=_token_id(file, "padding_token_id", len(tokens)),
        eot_id=_token_id(file, "eot_token_id", len(tokens)),
        eom_id=_token_id(file, "eom_token_id", len(tokens)),
        add_bos=file.scalar(_PREFIX + "add_bos_token", bool),
        add_eos=file.scalar(_PREFIX + "add_eos_token", bool),
        add_space_prefix=file.scalar(_PREFIX + "add_space_prefix", bool),
        remove_extra_whitespaces=file.scalar(_PREFIX + "remove_extra_whitespaces", bool),
    )


def _check_tokens(file: GgufFile, tokens: list[str]) -> None:
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise file.corrupt(f"the vocabulary has {len(tokens)} tokens")
    if max(map(len, tokens)) > MAX_TOKEN_CHARACTERS:
        raise file.corrupt(f"the vocabulary has a token of more than {MAX_TOKEN_CHARACTERS} characters")


def _scores(file: GgufFile, count: int) -> list[float]:
    scores = file.array(_PREFIX + "scores", "f32") or []
    if scores and len(scores) != count:
        raise file.corrupt(f"the vocabulary has {count} tokens and {len(scores)} scores")
    if any(map(math.isnan, scores)):
        raise file.corrupt("the vocabulary has a score that is not a number")
    return scores


def _token_types(file: GgufFile, count: int) -> list[int]:
    types = file.array(_PREFIX + "token_type", "i32") or []
    if types and len(types) != count:
        raise file.corrupt(f"the vocabulary has {count} tokens and {len(types)} token types")
    unknown = set(types).difference(_TOKEN_TYPES)
    if unknown:
        raise file.corrupt(f"the vocabulary has the unknown token type {min(unknown)}")
    return types


def _merges(file: GgufFile) -> list[str]:
    merges = file.array(_PREFIX + "merges", "string") or []
    if len(merges) > MAX_MERGES:
        raise file.corrupt(f"the vocabulary has {len(merges)} merges")
    return merges


def _token_id(file: GgufFile, key: str, count: int) -> int | None:
    found = file.scalar(_PREFIX + key, int)
    if found is not None and not 0 <= found < count:
        raise file.corrupt(f"{_PREFIX}{key} is {found}, and there are {count} tokens")
    return found
