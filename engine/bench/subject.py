"""What is measured, usually a model: loaded once, then driven through as many fresh engines as a benchmark has variants.

All variants run on the weights and the cache memory of one executor, in turn, so that comparing them costs no second copy of the
model and no reload between interleaved runs. A fresh engine starts with an empty cache and its own options; the one before it must
be idle. Torch is imported only when a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.bench import timing
from engine.bench.drive import Drive
from engine.built import DEFAULT_OPTIONS, EngineOptions
from engine.cache.layout import CacheLayout
from engine.engine import Engine
from engine.runtime.executor import Executor
from engine.types import LoadedInfo, ModelInfo, WorkerConfig

if TYPE_CHECKING:
    from engine.cache.layout import KvDtype
    from engine.models.spec import ModelSpec

CONTEXT_TOKENS = 8192
MAX_STEP_TOKENS = 512  # of every part that does not say otherwise; the product's default
WIDEST_STEP_TOKENS = 1024  # the throughput part feeds all its prompts in one step
MAX_SEQUENCES = 64
LEAST_PAGES = 320  # of each group; else half as much again as one context, so that no part on the model runs out of pages


@dataclass(frozen=True, slots=True)
class Subject:
    executor: Executor
    layout: CacheLayout
    pages: tuple[int, ...]
    context_tokens: int
    vocab_size: int
    clock: Callable[[], float] = timing.seconds

    def drive(
        self,
        options: EngineOptions = DEFAULT_OPTIONS,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> Drive:
        """Of an engine of its own, its cache empty."""
        engine = Engine(
            self.executor,
            self.layout,
            self.pages,
            context_tokens=self.context_tokens,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            options=options,
            clock=self.clock,
        )
        return Drive(engine, self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is loaded to be measured. The cache has half as much again as one context, and `least_pages` of each group."""

    context_tokens: int = CONTEXT_TOKENS
    max_step_tokens: int = WIDEST_STEP_TOKENS
    max_sequences: int = MAX_SEQUENCES
    least_pages: int = LEAST_PAGES
    backend: str = "auto"
    kv_dtype: str = ""  # "": the product's default
    threads: int | None = None
    isa: str = ""  # as in WorkerConfig
    packed_path: str = ""  # as in WorkerConfig
    weights_digest: str = ""

    def config(self, path: str) -> WorkerConfig:
        config = WorkerConfig(
            model_path=path,
            format="safetensors" if os.path.isdir(path) else "gguf",
            backend=self.backend,  # pyright: ignore[reportArgumentType]  # of a command line that knows them
            context_tokens=self.context_tokens,
            max_step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            threads=self.threads,
            isa=self.isa,
            packed_path=self.packed_path,
            weights_digest=self.weights_digest,
        )
        return msgspec.structs.replace(config, kv_dtype=self.kv_dtype) if self.kv_dtype else config


DEFAULT_SETUP = Setup()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A subject, and what is told of the model it is."""

    subject: Subject
    info: LoadedInfo
    model: ModelInfo
    read_weight_bytes: int  # in a step: all of them but an embedding that is not the head as well


def load_subject(path: str, progress: Callable[[str, float], Any], setup: Setup = DEFAULT_SETUP) -> Loaded:
    """Load `path` (a .gguf file or a folder) as the worker would. Raises what build_engine raises."""
    from engine.cache.layout import cache_layout
    from engine.cache.pool import context_pages, pages_bytes, pages_for_budget
    from engine.models.families import family_for
    from engine.runtime.load import build_engine
    from engine.weights.source import open_source

    config = setup.config(path)
    source = open_source(config.model_path, config.format)
    try:
        model = source.info
        spec = family_for(model.architecture).spec(model.config, config.context_tokens)
    finally:
        source.close()
    config = msgspec.structs.replace(config, context_tokens=min(config.context_tokens, spec.context_tokens))
    budget_layout = cache_layout(spec, _known_kv_dtype(config.kv_dtype))
    wanted = [max(setup.least_pages, pages * 3 // 2) for pages in context_pages(budget_layout, config.context_tokens)]
    config = msgspec.structs.replace(config, kv_memory_bytes=pages_bytes(budget_layout, wanted))
    built = build_engine(config, progress)
    layout = cache_layout(spec, _known_kv_dtype(built.info.kv_dtype))

    def shared(budget_bytes: int) -> tuple[int, ...]:
        limits = {name: getattr(config, name) for name in ("context_tokens", "max_sequences", "max_step_tokens")}
        return pages_for_budget(layout, budget_bytes, **limits)

    assert sum(shared(pages_bytes(budget_layout, wanted))) == built.info.pages_total, "the loader shared the memory otherwise"
    pages = shared(pages_bytes(layout, wanted))
    info = msgspec.structs.replace(built.info, kv_bytes=pages_bytes(layout, pages), pages_total=sum(pages))
    subject = Subject(built.engine.executor, layout, pages, info.context_tokens, info.vocab_size)
    return Loaded(subject, info, model, _read_weight_bytes(spec, info))


def _known_kv_dtype(kv_dtype: str) -> KvDtype:
    """Before a model is loaded nobody knows what "auto" will be: float32 takes the most. What is too much is left unused."""
    return "float32" if kv_dtype == "auto" else kv_dtype  # pyright: ignore[reportReturnType]


def _read_weight_bytes(spec: ModelSpec, info: LoadedInfo) -> int:
    """The embedding's share is taken for that of its parameters."""
    if spec.tied_embeddings:
        return info.weight_bytes
    return round(info.weight_bytes * (1 - spec.vocab_size * spec.hidden / info.parameters))
