"""The tokenizer of the default model against llama.cpp's recorded ids; BOS, control tokens, threads, cache, hopeless texts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.tokenizer import EncoderThreads, Piece, Tokenizer
from engine.errors import ContextLengthExceeded
from engine.types import GgufVocabulary
from engine.weights.gguf import GgufFile
from engine.weights.gguf_vocabulary import read_vocabulary
from tests.fixtures import tiny_tok

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
RECORDED = json.loads((DATA / "smollm2.json").read_text())
HARD_STRINGS = json.loads((DATA / "hard_strings.json").read_text())


def tiny(**changes: object) -> Tokenizer:
    return Tokenizer(read_gguf_vocabulary(msgspec.structs.replace(tiny_tok.tiny_vocabulary(), **changes)))


@pytest.fixture(scope="module")
def smollm2_vocabulary(real_model_path: Path) -> GgufVocabulary:
    source = read_vocabulary(GgufFile(real_model_path))
    assert source is not None
    return source


@pytest.fixture(scope="module")
def smollm2(smollm2_vocabulary: GgufVocabulary) -> Tokenizer:
    return Tokenizer(read_gguf_vocabulary(smollm2_vocabulary))


@pytest.mark.parametrize("parse_special", [False, True])
def test_hard_strings_equal_llama_cpp(smollm2: Tokenizer, parse_special: bool) -> None:
    recorded = RECORDED["hard_parse_special" if parse_special else "hard"]
    assert len(HARD_STRINGS) == 300
    for text, ids in zip(HARD_STRINGS, recorded, strict=True):
        assert smollm2.encode(text, add_special=False, parse_special=parse_special) == ids, text


def test_random_texts_equal_llama_cpp(smollm2: Tokenizer) -> None:
    assert len(RECORDED["random_texts"]) == 3_000
    for text, ids in zip(RECORDED["random_texts"], RECORDED["random"], strict=True):
        assert smollm2.encode(text, add_special=False, parse_special=False) == ids, text


def test_what_opens_a_text_equals_llama_cpp(smollm2: Tokenizer) -> None:
    for text, ids in zip(HARD_STRINGS, RECORDED["hard_add_special"], strict=False):
        assert smollm2.encode(text, add_special=True, parse_special=True) == ids, text


def test_texts_come_back_whole(smollm2: Tokenizer) -> None:
    for text in [*HARD_STRINGS, *RECORDED["random_texts"]]:
        assert smollm2.decode(smollm2.encode(text, add_special=False, parse_special=False)) == text


@pytest.mark.timing
def test_the_default_vocabulary_loads_fast(smollm2_vocabulary: GgufVocabulary) -> None:
    started = time.perf_counter()
    Tokenizer(read_gguf_vocabulary(smollm2_vocabulary))
    assert time.perf_counter() - started < 1.0  # 0.15 s on an idle core


def test_the_default_model_ends_with_its_turn(smollm2: Tokenizer) -> None:
    assert smollm2.end_ids >= {smollm2.special_tokens["<|im_end|>"], smollm2.special_tokens["<|endoftext|>"]}
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")


# --- BOS (row B04) -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parse_special"),
    [("hello", True), ("<s>hello", True), ("hello", False), ("<s>hello", False), ("", True), ("<s>", True)],
)
def test_b04_a_tokenizer_that_adds_bos_gives_exactly_one(text: str, parse_special: bool) -> None:
    ids = tiny(add_bos=True).encode(text, add_special=True, parse_special=parse_special)
    assert ids[0] == tiny_tok.BOS
    assert ids.count(tiny_tok.BOS) == 1


def test_b04_one_that_does_not_gives_what_the_text_has() -> None:
    assert tiny().encode("<s>hello", add_special=True, parse_special=True).count(tiny_tok.BOS) == 1
    assert tiny().encode("hello", add_special=True, parse_special=True).count(tiny_tok.BOS) == 0


def test_b04_nothing_is_added_unless_asked() -> None:
    assert tiny(add_bos=True, add_eos=True).encode("", add_special=False, parse_special=True) == []


def test_eos_is_added_once() -> None:
    tokenizer = tiny(add_eos=True)
    for text in ("the", "the</s>"):
        assert tokenizer.encode(text, add_special=True, parse_special=True).count(tiny_tok.EOS) == 1


# --- control tokens and plain text -------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*tiny_tok.SPECIALS, "<", "s>", "|im_", " the", "a"]), max_size=8).map("".join))
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    ids = tiny().encode(text, add_special=False, parse_special=False)
    assert min(ids, default=5) >= 5


def test_plain_pieces_join_the_text_around_them() -> None:
    tokenizer = tiny()
    pieces = [Piece("<|im_start|>us", True), Piece("er t", False), Piece("he<|im_end|>", True)]
    inner = tokenizer.encode("user the", add_special=False, parse_special=False)
    assert tokenizer.encode_pieces(pieces, add_special=False) == [tiny_tok.IM_START, *inner, tiny_tok.IM_END]
    assert tokenizer.encode_pieces([Piece("<|im_", True), Piece("end|>", False)], add_special=False)[0] >= 5


def test_a_model_without_a_vocabulary_of_its_own_size_gives_no_text_past_it() -> None:
    assert tiny().token_bytes(10**6) == b""


# --- threads, cache, hopeless texts ------------------------------------------------------------------------------------------


def test_encoding_on_a_thread_gives_the_same_ids(smollm2: Tokenizer) -> None:
    async def scenario() -> list[list[int]]:
        return await asyncio.gather(*(smollm2.encode_async([Piece(text, True)], add_special=True) for text in HARD_STRINGS))

    expected = [smollm2.encode(text, add_special=True, parse_special=True) for text in HARD_STRINGS]
    assert asyncio.run(scenario()) == expected


def test_at_most_two_texts_are_encoded_at_a_time() -> None:
    threads, running, most = EncoderThreads(), 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def scenario() -> None:
        await asyncio.gather(*(threads.run(work) for _ in range(8)))

    asyncio.run(scenario())
    threads.close()
    assert most == 2


@pytest.mark.timing
def test_the_event_loop_stays_awake_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    async def scenario() -> float:
        text = "".join(RECORDED["random_texts"]) * 20  # about a megabyte
        encoding = asyncio.create_task(smollm2.encode_async([Piece(text, True)], add_special=False))
        worst, before = 0.0, time.perf_counter()
        while not encoding.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, before = max(worst, now - before), now
        assert len(await encoding) > 100_000
        return worst

    assert asyncio.run(scenario()) < 0.1


def test_earlier_messages_are_encoded_once() -> None:
    tokenizer = tiny()
    encoded: list[str] = []
    encode_texts = tokenizer._encode_texts
    tokenizer._encode_texts = lambda texts, opens: (encoded.extend(texts), encode_texts(texts, opens))[1]
    chat = "<|im_start|>user\nwhy?<|im_end|>"
    first = tokenizer.encode(chat, add_special=False, parse_special=True)
    more = tokenizer.encode(chat + "<|im_start|>the sky<|im_end|>", add_special=False, parse_special=True)
    assert encoded == ["user\nwhy?", "the sky"]
    assert more[: len(first)] == first


def test_the_cache_forgets_the_oldest_texts() -> None:
    tokenizer = tiny()
    tokenizer._cache = type(tokenizer._cache)(letters=20)
    for number in range(50):
        tokenizer.encode(f"text {number}", add_special=False, parse_special=False)
    assert sum(len(text) for text, _ in tokenizer._cache._entries) <= 20
    assert tokenizer._cache.get(("text 49", True)) is not None
    assert tokenizer._cache.get(("text 1", True)) is None


def test_a_text_that_cannot_fit_is_refused_with_both_numbers(smollm2: Tokenizer) -> None:
    smollm2.refuse_if_hopeless(100 * smollm2.max_token_bytes, 100)
    with pytest.raises(ContextLengthExceeded) as error:
        smollm2.refuse_if_hopeless(100 * smollm2.max_token_bytes + 1, 100)
    assert error.value.message == "the prompt has at least 101 tokens and the context holds 100"


def test_no_token_stands_for_more_bytes_than_the_bound(smollm2: Tokenizer) -> None:
    longest = max(range(smollm2.vocab_size), key=lambda number: len(smollm2.token_bytes(number)))
    text = smollm2.token_bytes(longest).decode() * 50
    smollm2.refuse_if_hopeless(len(text.encode()), len(smollm2.encode(text, add_special=False, parse_special=False)))
