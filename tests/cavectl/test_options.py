"""-o key=value: the same names and kinds as the daemon's table of options, checked before anything is sent."""

from __future__ import annotations

import pytest

from cavectl.options import OPTION_TYPES, parse_options
from daemon.api.fields import OLLAMA_OPTIONS
from engine.errors import InvalidRequest


def test_the_names_are_those_the_daemon_honours() -> None:
    assert set(OPTION_TYPES) == {name for name, field in OLLAMA_OPTIONS.rows.items() if field.kind == "honoured"}


def test_values_have_the_kind_of_their_key() -> None:
    options = parse_options(["temperature=0.2", "top_k=5", "seed=18446744073709551615", "stop=a=b", "stop=\n"])
    assert options == {"temperature": 0.2, "top_k": 5, "seed": 2**64 - 1, "stop": ["a=b", "\n"]}
    assert isinstance(parse_options(["temperature=1"])["temperature"], float)


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
