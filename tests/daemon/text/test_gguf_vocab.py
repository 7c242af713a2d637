"""GGUF vocabularies: ids equal llama.cpp's, unknown kinds are refused by name, broken ones by what is wrong (row S10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.tokenizer import Tokenizer
from engine.errors import CavectlError
from engine.types import GgufVocabulary
from tests.daemon.text.conftest import SUPPORTED, SourcePackage
from tests.fixtures import tiny_tok

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
WITHOUT_CASES = {"baichuan"}  # recorded instead, see test_vocabularies_by_score
REFUSED = {
    "bert-bge": 'tokenizer model "bert" is not supported',
    "nomic-bert-moe": 'tokenizer model "t5" is not supported',
    "aquila": "the file names no pre-tokenizer (tokenizer.ggml.pre)",
    "gpt-neox": "the file names no pre-tokenizer (tokenizer.ggml.pre)",
}


def test_every_vocabulary_of_the_package_is_either_supported_or_refused(source_package: SourcePackage) -> None:
    assert source_package.vocabulary_names() == {*SUPPORTED, *REFUSED}


def test_ids_equal_llama_cpp(vocabulary_name: str, vocabulary_tokenizer: Tokenizer, source_package: SourcePackage) -> None:
    cases = source_package.cases(vocabulary_name)
    assert len(cases) >= 45 or vocabulary_name in WITHOUT_CASES
    for text, ids in cases:
        assert vocabulary_tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


def test_texts_come_back_whole(vocabulary_name: str, vocabulary_tokenizer: Tokenizer, source_package: SourcePackage) -> None:
    for text, _ in source_package.cases(vocabulary_name):
        ids = vocabulary_tokenizer.encode(text, add_special=False, parse_special=False)
        assert vocabulary_tokenizer.decode(ids, at_start=True) == text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, source_package: SourcePackage) -> None:
    source, _ = source_package.vocabulary(name)
    with pytest.raises(CavectlError) as error:
        read_gguf_vocabulary(source)
    assert (error.value.code, error.value.message) == ("unsupported_tokenizer", REFUSED[name])


def test_a_missing_pre_tokenizer_can_be_named(source_package: SourcePackage) -> None:
    source, _ = source_package.vocabulary("gpt-neox")
    tokenizer = Tokenizer(read_gguf_vocabulary(source, pre_tokenizer="mpt"))
    assert tokenizer.encode("Hello", add_special=False, parse_special=False) == [12092]


@pytest.mark.parametrize("name", ["baichuan", "llama-spm"])
def test_vocabularies_by_score_equal_recorded_ids(name: str, source_package: SourcePackage) -> None:
    recorded = json.loads((DATA / "llama.json").read_text())[f"ggml-vocab-{name}.gguf"]
    hard = json.loads((DATA / "hard_strings.json").read_text())
    random_texts = json.loads((DATA / "smollm2.json").read_text())["random_texts"]
    source, model_name = source_package.vocabulary(name)
    tokenizer = Tokenizer(read_gguf_vocabulary(source, model_name=model_name))
    texts = [*hard, *random_texts[: len(recorded["random"])]]
    for text, ids in zip(texts, recorded["hard"] + recorded["random"], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


def test_the_markers_of_phi3_take_the_white_space_after_them(source_package: SourcePackage) -> None:
    source, model_name = source_package.vocabulary("phi-3")
    tokenizer = Tokenizer(read_gguf_vocabulary(source, model_name=model_name))
    tight = tokenizer.encode("<|user|>Hi<|end|><|assistant|>", add_special=False, parse_special=True)
    assert tokenizer.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", add_special=False, parse_special=True) == tight


# --- S10 ---------------------------------------------------------------------------------------------------------------------


def byte_tokens(**changes: str) -> list[str]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "a", "b", "ab"]
    return [changes.get(token[1:-1], token) for token in tokens]


def llama_vocabulary(**changes: Any) -> GgufVocabulary:
    tokens = changes.pop("tokens", byte_tokens())
    fields: dict[str, Any] = {
        "model": "llama",
        "pre": "",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_types": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "merges": [],
    }
    return GgufVocabulary(**(fields | changes))


def gpt2_vocabulary(**changes: Any) -> GgufVocabulary:
    return msgspec.structs.replace(tiny_tok.tiny_vocabulary(), **changes)


BROKEN: dict[str, tuple[GgufVocabulary, str]] = {
    "byte-negative": (llama_vocabulary(tokens=byte_tokens(**{"0x41": "<0x-1>"})), "'<0x-1>', not <0x00> to <0xFF>"),
    "byte-letters": (llama_vocabulary(tokens=byte_tokens(**{"0x41": "<0xZZ>"})), "'<0xZZ>', not <0x00> to <0xFF>"),
    "byte-small": (llama_vocabulary(tokens=byte_tokens(**{"0xAB": "<0xab>"})), "'<0xab>', not <0x00> to <0xFF>"),
    "byte-missing": (llama_vocabulary(tokens=["<unk>", "<s>", "</s>", "a"], token_types=[]), "no token for byte 0x00"),
    "byte-twice": (llama_vocabulary(tokens=byte_tokens(**{"0x41": "<0x42>"})), "the same token twice"),
    "bos-huge": (gpt2_vocabulary(bos_id=2**31), "bos_token_id is 2147483648, outside the vocabulary of 320 tokens"),
    "eos-negative": (gpt2_vocabulary(eos_id=-1), "eos_token_id is -1, outside"),
    "pad-out": (gpt2_vocabulary(pad_id=320), "pad_token_id is 320, outside"),
    "merge-unknown": (gpt2_vocabulary(merges=["t h", "q uux"]), "merge 1 refers to a token that is not in the vocabulary"),
    "merge-result": (gpt2_vocabulary(merges=["q z"]), "merge 0 refers to a token"),
    "merge-one-part": (gpt2_vocabulary(merges=["th"]), "merge 0 refers to a token"),
    "scores-short": (llama_vocabulary(scores=[0.0]), "262 tokens and 1 scores"),
    "scores-none": (llama_vocabulary(scores=[]), "a llama vocabulary needs scores"),
    "types-short": (gpt2_vocabulary(token_types=[1]), "320 tokens and 1 token types"),
    "empty": (gpt2_vocabulary(tokens=[], token_types=[], merges=[]), "the vocabulary is empty"),
    "twice": (gpt2_vocabulary(tokens=["a"] * 320), "the same token twice"),
    "merges-ten-million": (gpt2_vocabulary(merges=["t h"] * 10**7), "10000000 merges, at most 2097152 are read"),
    "tokens-many": (gpt2_vocabulary(tokens=["a"] * (2**20 + 1)), "1048577 tokens, at most 1048576 are read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_s10_a_broken_vocabulary_is_refused(name: str) -> None:
    source, message = BROKEN[name]
    with pytest.raises(CavectlError) as error:
        read_gguf_vocabulary(source)
    assert error.value.code == "corrupt_file"
    assert message in error.value.message


def test_the_vocabularies_that_the_broken_ones_are_made_of_are_sound() -> None:
    assert Tokenizer(read_gguf_vocabulary(llama_vocabulary())).encode("ab", add_special=True, parse_special=False)[0] == 1
    assert Tokenizer(read_gguf_vocabulary(gpt2_vocabulary())).encode("the", add_special=True, parse_special=False) != []


def test_merges_cannot_make_a_control_token() -> None:
    tokens = byte_tokens()
    tokens[-3:] = ["<", "s", ">", "<s", "s>"]
    scores = [0.0] * 259 + [-1.0] * 5
    source = llama_vocabulary(tokens=tokens, scores=scores, add_space_prefix=False)
    ids = Tokenizer(read_gguf_vocabulary(source)).encode("<s>", add_special=False, parse_special=False)
    assert [tokens[number] for number in ids] == ["<s", ">"]


def test_user_defined_tokens_are_matched_in_any_text() -> None:
    tokens = tiny_tok.tokens()
    types = [2, 3, 3, 3, 3] + [1] * 315
    tokens[-1], types[-1] = "<tool>", 4
    source = gpt2_vocabulary(tokens=tokens, token_types=types, merges=tiny_tok.tiny_vocabulary().merges[:-1])
    tokenizer = Tokenizer(read_gguf_vocabulary(source))
    for parse_special in (False, True):
        assert tokenizer.encode("a<tool>b", add_special=False, parse_special=parse_special)[1] == 319
    assert "<tool>" not in tokenizer.special_tokens
    assert tokenizer.token_bytes(319) == b"<tool>"
