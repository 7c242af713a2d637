"""Vocabularies of GGUF files: read as written, refused when lists and ids do not fit together (S10)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import CorruptFile
from engine.weights.gguf import GgufFile
from engine.weights.gguf_vocabulary import MAX_TOKEN_CHARACTERS, MAX_TOKENS, read_vocabulary
from tests.engine.weights.test_gguf import write
from tests.fixtures.gguf_writer import ARRAY, BOOL, F32, I32, STRING, U32, Array, Key, Layout

TOKENS = ["<s>", "</s>", "a", "é"]
KEYS = {
    "model": (STRING, "gpt2"),
    "pre": (STRING, "smollm"),
    "tokens": (ARRAY, Array(STRING, TOKENS)),
    "scores": (ARRAY, Array(F32, [0.0, -1.0, -2.0, -3.0])),
    "token_type": (ARRAY, Array(I32, [3, 3, 1, 1])),
    "merges": (ARRAY, Array(STRING, ["a é"])),
    "bos_token_id": (U32, 0),
    "eos_token_id": (U32, 1),
    "unknown_token_id": (U32, 2),
    "padding_token_id": (U32, 3),
    "eot_token_id": (U32, 1),
    "eom_token_id": (U32, 2),
    "add_bos_token": (BOOL, True),
    "add_eos_token": (BOOL, False),
    "add_space_prefix": (BOOL, False),
    "remove_extra_whitespaces": (BOOL, True),
}


def layout(**changes: tuple[int, object] | None) -> Layout:
    keys = {**KEYS, **changes}
    return Layout([Key(f"tokenizer.ggml.{name}", *pair) for name, pair in keys.items() if pair])


def test_every_field_is_read(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, layout()))
    vocabulary = read_vocabulary(file)
    file.close()
    assert vocabulary is not None
    assert vocabulary.tokens == TOKENS
    assert (vocabulary.model, vocabulary.pre, vocabulary.merges) == ("gpt2", "smollm", ["a é"])
    assert (vocabulary.scores, vocabulary.token_types) == ([0.0, -1.0, -2.0, -3.0], [3, 3, 1, 1])
    ids = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id, vocabulary.eot_id, vocabulary.eom_id)
    assert ids == (0, 1, 2, 3, 1, 2)
    flags = (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix, vocabulary.remove_extra_whitespaces)
    assert flags == (True, False, False, True)


def test_only_tokens_are_needed(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, layout(**dict.fromkeys(KEYS.keys() - {"tokens"}))))
    vocabulary = read_vocabulary(file)
    file.close()
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.scores, vocabulary.token_types, vocabulary.merges) == ("", [], [], [])
    assert (vocabulary.bos_id, vocabulary.add_bos) == (None, None)


def test_no_tokens_is_no_vocabulary(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, Layout()))
    assert read_vocabulary(file) is None
    file.close()


BROKEN: dict[str, tuple[Layout, str]] = {
    "scores too short": (layout(scores=(ARRAY, Array(F32, [0.0]))), "1 scores"),
    "scores too long": (layout(scores=(ARRAY, Array(F32, [0.0] * 5))), "5 scores"),
    "a score that is no number": (layout(scores=(ARRAY, Array(F32, [0.0, 0.0, float("nan"), 0.0]))), "not a number"),
    "scores of another type": (layout(scores=(ARRAY, Array(I32, [0] * 4))), "not an array of f32"),
    "types too short": (layout(token_type=(ARRAY, Array(I32, [1]))), "1 token types"),
    "an unknown type": (layout(token_type=(ARRAY, Array(I32, [1, 1, 1, 7]))), "unknown token type 7"),
    "a negative type": (layout(token_type=(ARRAY, Array(I32, [1, 1, 1, -1]))), "unknown token type -1"),
    "no tokens": (layout(tokens=(ARRAY, Array(STRING, []))), "0 tokens"),
    "tokens of another type": (layout(tokens=(ARRAY, Array(I32, [1]))), "not an array of string"),
    "tokens that are no array": (layout(tokens=(STRING, "x")), "not an array of string"),
    "too many tokens": (layout(tokens=(ARRAY, Array(STRING, [""] * (MAX_TOKENS + 1)))), f"{MAX_TOKENS + 1} tokens"),
    "a token too long": (layout(tokens=(ARRAY, Array(STRING, ["x" * (MAX_TOKEN_CHARACTERS + 1)]))), "a token of more than"),
    "bos 2^31": (layout(bos_token_id=(U32, 2**31)), "bos_token_id is 2147483648"),
    "eos one too high": (layout(eos_token_id=(U32, 4)), "eos_token_id is 4"),
    "eot -1": (layout(eot_token_id=(I32, -1)), "eot_token_id is -1"),
    "bos as text": (layout(bos_token_id=(STRING, "<s>")), "bos_token_id"),
    "model as a number": (layout(model=(U32, 1)), "tokenizer.ggml.model"),
    "add_bos as a number": (layout(add_bos_token=(U32, 1)), "add_bos_token"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_what_does_not_fit_together_is_corrupt(tmp_path: Path, case: tuple[Layout, str]) -> None:
    broken, says = case
    file = GgufFile(write(tmp_path, broken))
    with pytest.raises(CorruptFile) as caught:
        read_vocabulary(file)
    file.close()
    assert says in caught.value.message


def test_too_many_merges_are_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.weights.gguf_vocabulary.MAX_MERGES", 3)
    file = GgufFile(write(tmp_path, replace(layout(merges=(ARRAY, Array(STRING, ["a b"] * 4))))))
    with pytest.raises(CorruptFile, match="4 merges"):
        read_vocabulary(file)
    file.close()


def test_the_vocabulary_of_the_real_model(real_model_path: Path) -> None:
    file = GgufFile(real_model_path)
    vocabulary = read_vocabulary(file)
    file.close()
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "smollm")
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (49_152, 48_900)
    assert (vocabulary.tokens[1], vocabulary.tokens[2]) == ("<|im_start|>", "<|im_end|>")
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.add_bos) == (1, 2, False)
