"""Names of speed tests: ppN is a prefill of N tokens, tgN a decode of N tokens; @D at depth D, xS of S sequences together.

Without @D a decode begins at depth 1, and with several sequences at depth 128 each. tg64@4096x8 is eight sequences that decode 64
tokens each with 4,096 before them. Nothing here knows how a test is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import InvalidRequest

DEFAULT_TESTS = "pp128,pp512,tg128,tg64@4096,tg64x8"
DEPTH_ALONE, DEPTH_TOGETHER = 1, 128
MOST = 1 << 20  # of each number
_PREFILL = re.compile(r"pp(?P<tokens>[0-9]+)")
_DECODE = re.compile(r"tg(?P<tokens>[0-9]+)(?:@(?P<depth>[0-9]+))?(?:x(?P<sequences>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """`tokens` of each sequence; `depth` tokens are there before, 0 in a prefill."""

    name: str
    tokens: int
    depth: int = 0
    sequences: int = 1

    @property
    def is_decode(self) -> bool:
        return self.depth > 0

    @property
    def mean_depth(self) -> float:
        """Tokens that a decode step reads, in the middle of the test."""
        return self.depth + (self.tokens + 1) / 2


def parse_test(name: str) -> SpeedTest:
    """Raises InvalidRequest."""
    if prefill := _PREFILL.fullmatch(name):
        return SpeedTest(name, _number(name, prefill["tokens"]))
    if decode := _DECODE.fullmatch(name):
        sequences = _number(name, decode["sequences"] or "1")
        depth = decode["depth"] or str(DEPTH_TOGETHER if sequences > 1 else DEPTH_ALONE)
        return SpeedTest(name, _number(name, decode["tokens"]), _number(name, depth), sequences)
    raise InvalidRequest(f"no speed test is called {name!r}", hint="ppN, tgN, tgN@DEPTH, tgNxSEQUENCES, for example tg64@4096x8")


def parse_tests(names: str) -> list[SpeedTest]:
    """Of a list separated by commas. Raises InvalidRequest, also for an empty one and for a test named twice."""
    tests = [parse_test(name.strip()) for name in names.split(",") if name.strip()]
    if not tests:
        raise InvalidRequest("no speed test is named", hint=f"for example --tests {DEFAULT_TESTS}")
    known = [test.name for test in tests]
    if twice := next((name for name in known if known.count(name) > 1), None):
        raise InvalidRequest(f"the test {twice} is named twice", hint="--reps says how often each is run")
    return tests


def _number(name: str, digits: str) -> int:
    number = int(digits[:9])
    if len(digits) > 9 or not 1 <= number <= MOST:
        raise InvalidRequest(f"a number of the test {name!r} is not from 1 to {MOST}", hint=f"for example {DEFAULT_TESTS}")
    return number
