"""Stop strings (rows B02, B03): against a search of the whole text, in every chunking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.text.stop import StopMatcher
from engine.errors import InvalidRequest


def stream(stops: list[str], chunks: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The deltas and the stop that was found; the flush comes last unless something was found."""
    matcher = StopMatcher(stops, include)
    deltas: list[str] = []
    for chunk in chunks:
        result = matcher.push(chunk)
        deltas.append(result.text)
        if result.stopped is not None:
            assert matcher.push("more").text == matcher.flush().text == ""
            return deltas, result.stopped
    deltas.append(matcher.flush().text)
    return deltas, None


def search(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The whole-text answer, by trying every end and every stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_b02_a_stop_over_several_tokens_leaks_nothing() -> None:
    assert stream(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", ""], "DEFGHIJ")


def test_b02_what_was_held_back_is_let_out_when_it_is_no_stop() -> None:
    assert stream(["DEFGHIJ"], ["DEF", "G", "X"]) == (["", "", "DEFGX", ""], None)


def test_b03_a_stop_inside_a_token() -> None:
    assert stream(["DE"], ["DEF"]) == ([""], "DE")
    assert stream(["DE"], ["xDEF"], include=True) == (["xDE"], "DE")


@pytest.mark.parametrize("chunks", [["ab", "c"], ["a", "b", "c"], ["abc"]])
def test_b03_of_overlapping_stops_the_one_complete_first_cuts(chunks: list[str]) -> None:
    assert stream(["abc", "ab"], chunks)[1] == "ab"


def test_b03_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        StopMatcher(["x", ""])


def test_without_stops_nothing_is_held_back() -> None:
    assert stream([], ["a", "", "b"]) == (["a", "", "b", ""], None)


chunked = st.lists(st.text("ab", max_size=4), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(stops, chunked, st.booleans())
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(stops: list[str], chunks: list[str], include: bool) -> None:
    deltas, stopped = stream(stops, chunks, include)
    assert ("".join(deltas), stopped) == search(stops, "".join(chunks), include)


@given(stops, chunked)
def test_only_the_longest_possible_beginning_of_a_stop_is_held_back(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = out = ""
    for chunk in chunks:
        result = matcher.push(chunk)
        if result.stopped is not None:
            return
        seen += chunk
        out += result.text
        beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
        assert len(seen) - len(out) == max((len(b) for b in beginnings if seen.endswith(b)), default=0)


@given(stops, st.text("ab", max_size=14))
def test_every_chunking_gives_the_same_text(stops: list[str], text: str) -> None:
    whole, stopped = search(stops, text, include=False)
    for size in range(1, len(text) + 1):
        deltas, found = stream(stops, [text[at : at + size] for at in range(0, len(text), size)])
        assert ("".join(deltas), found) == (whole, stopped)


@pytest.mark.timing
@pytest.mark.timeout(20)
def test_a_hostile_stop_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 5_000 + "b"])
    assert sum(len(matcher.push("a" * 1_000).text) for _ in range(1_000)) == 1_000_000 - 5_000
