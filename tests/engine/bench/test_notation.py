"""Names of speed tests, read and refused."""

from __future__ import annotations

import pytest

from engine.bench.notation import DEFAULT_TESTS, SpeedTest, parse_test, parse_tests
from engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "tokens", "depth", "sequences"),
    [
        ("pp128", 128, 0, 1),
        ("tg128", 128, 1, 1),
        ("tg64@4096", 64, 4096, 1),
        ("tg64x8", 64, 128, 8),
        ("tg64x1", 64, 1, 1),
        ("tg1@2x3", 1, 2, 3),
    ],
)
def test_names_say_what_is_measured(name: str, tokens: int, depth: int, sequences: int) -> None:
    test = parse_test(name)
    assert test == SpeedTest(name, tokens, depth, sequences)
    assert test.is_decode == name.startswith("tg")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "pp",
        "tg",
        "pp0",
        "tg0",
        "tg8@0",
        "tg8x0",
        "pp-1",
        "pp128@4",
        "pp128x2",
        "tg8x2@4",
        "tg8@",
        "tg 8",
        "TG8",
        "pp١",
        "pp1.5",
    ],
)
def test_what_is_no_test_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_test(name)
    assert "\n" not in error.value.message and error.value.hint


@pytest.mark.parametrize("name", ["pp1048577", "tg1@9999999999999999999999", "tg" + "9" * 5000])
def test_numbers_have_a_bound(name: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_test(name)


def test_lists() -> None:
    assert [test.name for test in parse_tests(" pp1, tg2 ,")] == ["pp1", "tg2"]
    assert len(parse_tests(DEFAULT_TESTS)) == 5
    for text, said in ((" , ", "no speed test is named"), ("pp1,tg2,pp1", "pp1 is named twice"), ("pp1,fast", "'fast'")):
        with pytest.raises(InvalidRequest, match=said):
            parse_tests(text)


def test_the_middle_of_a_decode() -> None:
    """tg3@10 reads 11, 12 and 13 tokens."""
    assert parse_test("tg3@10").mean_depth == 12
