"""Streamed text (row B01): the deltas are valid, and joined they are the one-shot decoding."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.text.detokenizer import Detokenizer
from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.tokenizer import Tokenizer
from engine.types import GgufVocabulary
from tests.fixtures import tiny_tok

SPACE = "\u2581"


def llama_vocabulary() -> GgufVocabulary:
    """A vocabulary with byte fallback and a space before each text."""
    words = [SPACE, "a", "b", SPACE + "a", "ab", "é", SPACE + "ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *words]
    return GgufVocabulary(
        model="llama",
        pre="",
        tokens=tokens,
        scores=[0.0] * 259 + [-float(number) for number in range(len(words))],
        token_types=[2, 3, 3] + [6] * 256 + [1] * len(words),
        merges=[],
    )


@pytest.fixture(scope="module", params=["byte-level", "llama"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    source = tiny_tok.tiny_vocabulary() if request.param == "byte-level" else llama_vocabulary()
    return Tokenizer(read_gguf_vocabulary(source))


def byte_id(tokenizer: Tokenizer, value: int) -> int:
    return next(number for number in range(tokenizer.vocab_size) if tokenizer.token_bytes(number) == bytes([value]))


def deltas(tokenizer: Tokenizer, ids: list[int], at_start: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, at_start=at_start)
    return [*(detokenizer.push(number) for number in ids), detokenizer.flush()]


def test_b01_characters_split_over_tokens_come_whole(tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, value) for value in "é🙂한".encode()]
    assert deltas(tokenizer, ids) == ["", "é", "", "", "", "🙂", "", "", "한", ""]


def test_b01_only_invalid_bytes_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, value) for value in b"\xf0 x"]
    assert deltas(tokenizer, ids) == ["", "\ufffd ", "x", ""]
    assert tokenizer.decode(ids) == "\ufffd x"


def test_b01_an_end_in_mid_character_shows_once(tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, value) for value in b"a\xf0\x9f\x99"] + [2]
    assert deltas(tokenizer, ids) == ["a", "", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


def test_control_tokens_and_ids_past_the_vocabulary_give_no_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.special_tokens["<s>"], byte_id(tokenizer, 0x61), tokenizer.vocab_size + 5]
    assert deltas(tokenizer, ids) == ["", "a", "", ""]


def test_the_first_space_belongs_to_the_vocabulary_only_at_the_start_of_a_text() -> None:
    tokenizer = Tokenizer(read_gguf_vocabulary(llama_vocabulary()))
    ids = tokenizer.encode("ab a", add_special=False, parse_special=False)
    assert [tokenizer.token_bytes(number) for number in ids] == [b" ab", b" a"]
    assert "".join(deltas(tokenizer, ids, at_start=True)) == "ab a" == tokenizer.decode(ids, at_start=True)
    assert "".join(deltas(tokenizer, ids)) == " ab a" == tokenizer.decode(ids)


@given(st.data())
def test_streamed_is_one_shot(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    at_start = data.draw(st.booleans())
    parts = deltas(tokenizer, ids, at_start)
    assert "".join(parts) == tokenizer.decode(ids, at_start=at_start)
    for part in parts:
        assert part.encode().decode() == part


@given(st.text(max_size=60))
def test_text_survives_the_way_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids, at_start=True) == text.replace(SPACE, " " if tokenizer.leading_space else SPACE)


def test_the_decoder_of_the_standard_library_is_the_same_in_any_chunking() -> None:
    """What the detokenizer stands on: replacement characters do not depend on where the bytes are cut."""
    tails = [b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xff"]
    for one in tails:
        for two in tails:
            data = one + two + b"a"
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            streamed = "".join(decoder.decode(data[at : at + 1]) for at in range(len(data))) + decoder.decode(b"", final=True)
            assert streamed == data.decode("utf-8", "replace")
