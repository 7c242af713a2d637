"""Pre-tokenizers: under every name in the table, ids equal those that llama.cpp gives for the same vocabulary under that name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.pre_tokenizers import is_known_pattern, names, word_split
from daemon.text.tokenizer import Tokenizer
from engine.errors import CavectlError
from engine.types import GgufVocabulary
from tests.daemon.text.conftest import SourcePackage

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
RECORDED = json.loads((DATA / "pre_tokenizers.json").read_text())
OWN = "llama-bpe"
PROVEN_ELSEWHERE = {"gemma4"}  # another kind of vocabulary, see test_gguf_vocab
TEXTS = [
    *json.loads((DATA / "hard_strings.json").read_text()),
    *json.loads((DATA / "smollm2.json").read_text())["random_texts"][:300],
]


@pytest.fixture(scope="module")
def vocabulary(source_package: SourcePackage) -> GgufVocabulary:
    return source_package.vocabulary(OWN)[0]


@pytest.fixture(scope="module", params=sorted({word_split(name).patterns for name in names() if name not in PROVEN_ELSEWHERE}))
def split_ids(request: pytest.FixtureRequest, vocabulary: GgufVocabulary) -> tuple[list[str], list[list[int]]]:
    """The names that cut alike, and the ids of all texts under the first of them: merging is the same for all."""
    alike = [name for name in names() if word_split(name).patterns == request.param]
    tokenizer = Tokenizer(read_gguf_vocabulary(msgspec.structs.replace(vocabulary, pre=alike[0])))
    return alike, [tokenizer.encode(text, add_special=False, parse_special=False) for text in TEXTS]


def test_every_name_has_a_recording() -> None:
    assert set(names()) - PROVEN_ELSEWHERE <= RECORDED.keys()
    assert len(names()) == len(set(names()))


def test_ids_equal_llama_cpp_under_every_name(split_ids: tuple[list[str], list[list[int]]]) -> None:
    alike, ids = split_ids
    for name in alike:
        changed = {} if name == OWN else RECORDED[name]
        for number, text in enumerate(TEXTS):
            assert ids[number] == changed.get(str(number), RECORDED[OWN][number]), (name, text)


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(CavectlError) as error:
        word_split("superbpe")
    assert error.value.code == "unsupported_tokenizer"
    assert '"superbpe"' in error.value.message


def test_another_name_stands_in_for_an_unknown_one_only() -> None:
    assert word_split("superbpe", "gpt-2") == word_split("", "gpt-2") == word_split("gpt-2")
    assert word_split("qwen2", "gpt-2") == word_split("qwen2")
    with pytest.raises(CavectlError, match='"no such"'):
        word_split("superbpe", "no such")


def test_only_listed_patterns_are_compiled() -> None:
    assert is_known_pattern(word_split("llama-bpe").patterns[0])
    assert not is_known_pattern(r"(a+)+$")
