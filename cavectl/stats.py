"""What --stats prints after an answer, on stderr: how long, how many, how fast.

From the last event of the stream: Ollama's durations (nanoseconds) and counts, and our `timings` (milliseconds). A figure that the
daemon did not give is left out, never guessed.
"""

from __future__ import annotations

from typing import Any

from cavectl.client import Client
from cavectl.output import size
from engine.errors import CavectlError


def stats_lines(final: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """The lines for people. `loaded` is the model's entry of /api/ps, {} when it is not in memory."""
    timings: dict[str, Any] = final.get("timings") or {}
    rows: list[tuple[str, str | None]] = [
        ("total duration", _seconds(final.get("total_duration"))),
        ("load duration", _seconds(final.get("load_duration"))),
        *_phase("prompt eval", final.get("prompt_eval_count"), final.get("prompt_eval_duration")),
        *_phase("eval", final.get("eval_count"), final.get("eval_duration")),
        ("ttft", _milliseconds(timings.get("ttft_ms"))),
        ("cached prompt tokens", _count(timings.get("cache_n"))),
        ("drafted tokens", _drafted(timings)),
        ("queue wait", _milliseconds(timings.get("queue_ms"))),
        ("peak device memory", size(peak) if (peak := loaded.get("peak_device_bytes")) else None),
        ("context used", _context(final, loaded)),
    ]
    return [f"{name + ':':<22}{value}" for name, value in rows if value is not None]


def stats_document(final: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """The same as data: the last event without its text, and the context."""
    kept = {k: v for k, v in final.items() if k not in ("message", "response", "context", "context_length", "done")}
    return kept | {"context_used": _used(final), "context_limit": _limit(final, loaded)}


def context_is_full(final: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Whether prompt and answer reach the end of the context. False when the daemon does not say how long that is."""
    limit = _limit(final, loaded)
    return limit is not None and _used(final) >= limit


def loaded_entry(client: Client, model: Any) -> dict[str, Any]:
    """The /api/ps entry of the model that answered; {} when it has left memory since."""
    try:
        models: list[dict[str, Any]] = client.get("/api/ps")["models"]
    except CavectlError:
        return {}
    return next((m for m in models if model in (m.get("name"), m.get("model"))), {})


def _phase(name: str, count: Any, nanoseconds: Any) -> list[tuple[str, str | None]]:
    rate = f"{count / nanoseconds * 1e9:.2f} tokens/s" if count and nanoseconds else None
    return [(f"{name} count", _count(count)), (f"{name} duration", _seconds(nanoseconds)), (f"{name} rate", rate)]


def _count(value: Any) -> str | None:
    return None if value is None else f"{value} token(s)"


def _drafted(timings: dict[str, Any]) -> str | None:
    """What speculation guessed, and how much of it was right; nothing where it guessed nothing."""
    drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
    return f"{drafted} token(s), {accepted} right ({accepted / drafted:.0%})" if drafted and accepted is not None else None


def _seconds(nanoseconds: Any) -> str | None:
    return None if nanoseconds is None else _milliseconds(nanoseconds / 1e6)


def _milliseconds(value: Any) -> str | None:
    if value is None:
        return None
    return f"{value / 1000:.3f} s" if value >= 1000 else f"{value:.1f} ms"


def _used(final: dict[str, Any]) -> int:
    return int(final.get("prompt_eval_count") or 0) + int(final.get("eval_count") or 0)


def _limit(final: dict[str, Any], loaded: dict[str, Any]) -> int | None:
    """The context of the request, which --ctx can make smaller than what the model was loaded with."""
    return final.get("context_length") or loaded.get("context_length")


def _context(final: dict[str, Any], loaded: dict[str, Any]) -> str:
    limit = _limit(final, loaded)
    return f"{_used(final)} of {limit} tokens" if limit else f"{_used(final)} tokens"
