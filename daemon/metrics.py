"""Counters of the daemon, as Prometheus text with llama-server's names where it has one.

Invariant: counters only grow; gauges are read from the loaded models when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daemon.request import Summary
from engine.types import EngineStats


@dataclass(slots=True)
class Metrics:
    """Totals since the daemon started. Seconds and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    predicted_tokens: int = 0
    predicted_s: float = 0.0

    def count(self, summary: Summary) -> None:
        self.requests += 1
        self.prompt_tokens += summary.prompt_tokens - summary.cached_tokens
        self.cached_tokens += summary.cached_tokens
        self.prompt_s += summary.prompt_ms / 1e3
        self.predicted_tokens += summary.output_tokens
        self.predicted_s += summary.predicted_ms / 1e3

    def text(self, stats: Iterable[EngineStats], *, active: int, waiting: int) -> str:
        """The page that a Prometheus server reads."""
        engines = list(stats)
        pages = sum(s.pages_total for s in engines)
        used = sum(s.pages_used for s in engines)
        rows: list[tuple[str, str, str, float]] = [
            ("llamacpp:prompt_tokens_total", "counter", "Prompt tokens computed", self.prompt_tokens),
            ("llamacpp:prompt_seconds_total", "counter", "Time from first scheduled to first token", self.prompt_s),
            ("llamacpp:tokens_predicted_total", "counter", "Tokens generated", self.predicted_tokens),
            ("llamacpp:tokens_predicted_seconds_total", "counter", "Time from first token to last", self.predicted_s),
            ("llamacpp:n_decode_total", "counter", "Engine steps of the loaded models", sum(s.step for s in engines)),
            ("llamacpp:kv_cache_usage_ratio", "gauge", "Cache pages in use", used / pages if pages else 0.0),
            ("llamacpp:requests_processing", "gauge", "Requests that stream", active - waiting),
            ("llamacpp:requests_deferred", "gauge", "Requests that wait", waiting),
            ("cavectl:requests_total", "counter", "Requests finished", self.requests),
            ("cavectl:cached_tokens_total", "counter", "Prompt tokens taken from the cache", self.cached_tokens),
            ("cavectl:models_loaded", "gauge", "Models with a worker that has made a step", len(engines)),
        ]
        return "".join(f"# HELP {name} {help_}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, help_, value in rows)
