"""-o key=value: the same names, kinds and ranges as the daemon's table of options, checked before anything is sent."""

from __future__ import annotations

import math

import pytest

from cavectl.options import ALIASES, OPTIONS, Number, parse_options, set_flag
from daemon.api.fields import OLLAMA_OPTIONS
from daemon.api.readers import Int, Num, Reader, StopStrings
from engine.errors import InvalidRequest


def of_reader(reader: Reader) -> Number | None:
    match reader:
        case Int(low, high):
            return Number(int, low, high)
        case Num(low, high, above):
            return Number(float, low, high, above)
        case _:
            assert isinstance(reader, StopStrings)
            return None


def test_names_and_ranges_are_those_the_daemon_honours() -> None:
    honoured = {name: field for name, field in OLLAMA_OPTIONS.rows.items() if field.kind == "honoured"}
    assert dict(OPTIONS) == {name: of_reader(field.reader) for name, field in honoured.items()}
    assert set(ALIASES.values()) <= set(OPTIONS)


def test_values_have_the_kind_of_their_key() -> None:
    options = parse_options(["temperature=0.2", "top_k=5", "seed=18446744073709551615", "stop=a=b", "stop=\n"])
    assert options == {"temperature": 0.2, "top_k": 5, "seed": 2**64 - 1, "stop": ["a=b", "\n"]}
    assert isinstance(parse_options(["temperature=1"])["temperature"], float)
    assert parse_options(["max_tokens=5"]) == {"num_predict": 5}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("temperature=nan", "temperature is a number from 0 to 100, not nan"),
        ("temperature=-5", "temperature is a number from 0 to 100, not -5.0"),
        ("top_p=inf", "top_p is a number from 0 to 1, not inf"),
        ("repeat_penalty=0", "repeat_penalty is a number above 0 to 10, not 0.0"),
        (
            "seed=18446744073709551616",
            "seed is a whole number from -9223372036854775808 to 18446744073709551615, not 18446744073709551616",
        ),
        ("max_tokens=-3", "max_tokens is a whole number from -2 to 2147483647, not -3"),
    ],
)
def test_numbers_out_of_range_are_refused(pair: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_options([pair])
    assert caught.value.message == message
    assert caught.value.hint == f"for example -o {pair.partition('=')[0]}=1"


def test_flags_have_the_ranges_of_their_options() -> None:
    options = {"seed": 1}
    set_flag(options, "--seed", "seed", None)
    set_flag(options, "--temp", "temperature", 0.5)
    assert options == {"seed": 1, "temperature": 0.5}
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(InvalidRequest, match="--temp is a number from 0 to 100"):
            set_flag(options, "--temp", "temperature", value)


@pytest.mark.parametrize(
    ("pair", "hint"),
    [
        ("top_kk=1", "top_k"),
        ("seed=x", "seed=1"),
        ("top_k=1.5", "top_k=1"),
        ("temperature", "temperature=0.2"),
        ("=1", "there are"),
    ],
)
def test_wrong_ones_are_refused_with_a_hint(pair: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_options([pair])
    assert hint in caught.value.hint
