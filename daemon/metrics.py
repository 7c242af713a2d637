"""Counters of the daemon, as Prometheus text with llama-server's names where it has one.

Invariant: counters only grow, also when a model goes: what its worker had counted is kept. Gauges are read from the loaded models
when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.request import Summary
from engine.types import EngineStats

Sample = tuple[str, float]  # labels, value


class Counted(Protocol):
    """What is needed of a worker that ended."""

    @property
    def stats(self) -> EngineStats | None: ...
    @property
    def hung(self) -> bool: ...


@dataclass(slots=True)
class EngineTotals:
    """What workers that are gone had counted, and how they went."""

    steps: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    accounting_errors: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    watchdog_kills: int = 0
    restarts: int = 0

    def add(self, worker: Counted) -> None:
        self.watchdog_kills += worker.hung
        if worker.stats is not None:
            self.steps += worker.stats.step
            self.preemptions += worker.stats.preemptions
            self.evicted_pages += worker.stats.evicted_pages
            self.accounting_errors += worker.stats.accounting_errors
            self.drafted_tokens += worker.stats.drafted_tokens
            self.accepted_tokens += worker.stats.accepted_tokens


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

    def text(self, stats: Iterable[EngineStats], gone: EngineTotals, *, active: int, waiting: int) -> str:
        """The page that a Prometheus server reads."""
        engines = list(stats)
        return "".join(
            [
                _counter("llamacpp:prompt_tokens_total", "Prompt tokens computed", self.prompt_tokens),
                _counter("llamacpp:prompt_seconds_total", "Time from first scheduled to first token", self.prompt_s),
                _counter("llamacpp:tokens_predicted_total", "Tokens generated", self.predicted_tokens),
                _counter("llamacpp:tokens_predicted_seconds_total", "Time from first token to last", self.predicted_s),
                _gauge("llamacpp:requests_processing", "Requests that stream", active - waiting),
                _gauge("llamacpp:requests_deferred", "Requests that wait", waiting),
                _counter("cavectl:requests_total", "Requests finished", self.requests),
                _counter("cavectl:cached_tokens_total", "Prompt tokens taken from the cache", self.cached_tokens),
                *_engine_rows(engines, gone),
            ]
        )


def _engine_rows(engines: Sequence[EngineStats], gone: EngineTotals) -> list[str]:
    total = sum(s.pages_total for s in engines)
    used = sum(s.pages_used for s in engines)
    cached = sum(s.pages_cached for s in engines)
    pinned = sum(s.pages_pinned for s in engines)
    pages = {"used": used, "cached": cached, "pinned": pinned, "free": total - used - cached - pinned}
    preemptions = gone.preemptions + sum(s.preemptions for s in engines)
    evicted = gone.evicted_pages + sum(s.evicted_pages for s in engines)
    wrong = gone.accounting_errors + sum(s.accounting_errors for s in engines)
    drafted = gone.drafted_tokens + sum(s.drafted_tokens for s in engines)
    accepted = gone.accepted_tokens + sum(s.accepted_tokens for s in engines)
    by_state = [(f'{{state="{state}"}}', count) for state, count in pages.items()]
    return [
        _counter("llamacpp:n_decode_total", "Engine steps", gone.steps + sum(s.step for s in engines)),
        _gauge("llamacpp:kv_cache_usage_ratio", "Cache pages that requests hold", used / total if total else 0.0),
        _family("cavectl:kv_pages", "gauge", "Cache pages by what they are for", by_state),
        _counter("cavectl:preemptions_total", "Requests that gave their pages to others", preemptions),
        _counter("cavectl:evicted_pages_total", "Cached pages dropped for their space", evicted),
        _counter("cavectl:accounting_errors_total", "Checks that found the cache's accounts wrong", wrong),
        _counter("cavectl:drafted_tokens_total", "Tokens that speculation guessed", drafted),
        _counter("cavectl:accepted_tokens_total", "Guessed tokens that were right", accepted),
        _counter("cavectl:watchdog_kills_total", "Workers killed because they hung", gone.watchdog_kills),
        _counter("cavectl:worker_restarts_total", "Workers started in place of dead ones", gone.restarts),
        _gauge("cavectl:models_loaded", "Models in memory", len(engines)),
    ]


def _counter(name: str, help_: str, value: float) -> str:
    return _family(name, "counter", help_, [("", value)])


def _gauge(name: str, help_: str, value: float) -> str:
    return _family(name, "gauge", help_, [("", value)])


def _family(name: str, kind: Literal["counter", "gauge"], help_: str, samples: Sequence[Sample]) -> str:
    lines = [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *(f"{name}{labels} {value}" for labels, value in samples)]
    return "\n".join(lines) + "\n"
