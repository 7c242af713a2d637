"""How long an idle model stays loaded, as clients write it: seconds, or a duration such as "1h30m".

Negative is for ever (`math.inf`), 0 is at once. Invariant: what is not understood is refused, never replaced by a default.
"""

from __future__ import annotations

import math
import re
from typing import Any

from engine.errors import InvalidRequest

LONGEST_S = 10 * 365 * 86400.0

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})")
_PART = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(ns|us|µs|μs|ms|s|m|h)")


def parse_keep_alive(value: Any) -> float:
    """Seconds, `math.inf` for ever. Raises InvalidRequest."""
    seconds = _seconds(value)
    if seconds is None:
        raise InvalidRequest(
            "`keep_alive` must be a number of seconds or a duration",
            hint='for example 300, "5m", "1h30m", 0 (unload at once) or -1 (keep for ever)',
        )
    if seconds < 0:
        return math.inf
    if seconds > LONGEST_S:
        raise InvalidRequest("`keep_alive` must be at most ten years", hint="a negative value keeps the model for ever")
    return seconds


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str) and len(value) <= 64:
        return _from_text(value.strip())
    return None


def _from_text(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        return None
    return sign * sum(float(number) * _UNIT_S[unit] for number, unit in parts)
