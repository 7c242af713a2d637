"""From a WorkerConfig to an Engine that is ready: file -> spec -> backend -> memory plan -> weights -> executor -> engine.

Owned here: the order, the choice of backend, and what a person is told about it. What a backend needs and how it is filled is in
native_load.py and torch_load.py, of which only the one that runs is imported: the native one needs neither torch nor numpy.
Invariant: nothing large is allocated before the memory plan says that it fits, and whatever runs other than asked has a line in
`degraded`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from engine import platform
from engine.built import Built, EngineOptions, NeedsReload
from engine.cache.layout import CacheLayout, KvDtype, cache_layout
from engine.cache.pool import context_pages, pages_bytes
from engine.engine import Engine
from engine.errors import CavectlError, InvalidRequest, OutOfMemory
from engine.models.families import Family, family_for
from engine.models.spec import ModelSpec, ParameterInfo
from engine.runtime.batch import PAGE_TOKENS
from engine.runtime.executor import Executor
from engine.runtime.memory import MemoryPlan, Needs, plan_growth, plan_memory
from engine.runtime.native_plan import unsupported
from engine.speculative.adaptive import Speculation
from engine.speculative.prompt_lookup import PromptLookup
from engine.speculative.tree import Limits
from engine.types import LoadedInfo, ModelInfo, WorkerConfig
from engine.weights.source import WeightSource, open_source

Progress = Callable[[str, float], None]

DRAFT_LIMITS = Limits(nodes=16, depth=12, branches=3)  # of a tree


@dataclass(frozen=True, slots=True)
class Reading:
    """An open checkpoint and what its config means. `config` is the one asked for, resolved: its context cut to what the model can,
    its kv_dtype a real one."""

    config: WorkerConfig
    source: WeightSource
    family: Family
    spec: ModelSpec
    parameters: Mapping[str, ParameterInfo]
    threads: int

    @property
    def layout(self) -> CacheLayout:
        return cache_layout(self.spec, _real(self.config.kv_dtype))


class Filled(Protocol):
    """A backend's executor with its weights."""

    @property
    def executor(self) -> Executor: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        ...

    @property
    def warnings(self) -> list[str]: ...

    @property
    def isa(self) -> str:
        """The instruction set that was chosen when it was loaded; "" where nothing is chosen."""
        ...


class Backend(Protocol):
    """What native_load and torch_load are to this module."""

    name: str

    def needs(self, reading: Reading) -> Needs:
        """What it will take besides the cache; nothing is allocated."""
        ...

    def fill(self, reading: Reading, layout: CacheLayout, pages: tuple[int, ...], progress: Progress) -> Filled: ...

    def free_bytes(self) -> int:
        """Memory of the device that can be had now."""
        ...

    def degraded(self, reading: Reading) -> list[str]:
        """What of this backend is other than a person might expect."""
        ...


@dataclass(frozen=True, slots=True)
class _Model:
    """A model in memory, and what was decided for it."""

    config: WorkerConfig
    info: ModelInfo
    reading: Reading  # its source is closed
    backend: Backend
    layout: CacheLayout
    memory: MemoryPlan
    filled: Filled
    speculation: Speculation | None


def build_engine(config: WorkerConfig, progress: Progress) -> Built:
    """Load the model. Raises UnsupportedModel, CorruptFile, OutOfMemory (with both numbers), or device_unavailable."""
    started = time.monotonic()
    model, reasons = _read(config, progress)
    engine = _engine(model)
    info = _info(config, model, reasons, (time.monotonic() - started) * 1e3)
    return Built(engine, info, _Growth(engine, model, info).grow)


def _read(asked: WorkerConfig, progress: Progress) -> tuple[_Model, list[str]]:
    progress("reading", 0.0)
    _check_asked(asked)
    source = open_source(asked.model_path, asked.format)
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, asked.context_tokens)
        backend, reasons = _choose_backend(asked, spec)
        kv_dtype = _kv_dtype(asked, backend)
        config = msgspec.structs.replace(asked, context_tokens=min(asked.context_tokens, spec.context_tokens), kv_dtype=kv_dtype)
        threads = config.threads or platform.physical_cores()
        reading = Reading(config, source, family, spec, family.parameters(spec), threads)
        layout = reading.layout
        memory = plan_memory(backend.needs(reading), layout, config=config, available_bytes=_available_bytes(backend, config))
        filled = backend.fill(reading, layout, memory.pages, progress)
        return _Model(config, source.info, reading, backend, layout, memory, filled, _speculation(config, layout)), reasons
    finally:
        source.close()


def _engine(model: _Model) -> Engine:
    config = model.config
    return Engine(
        model.filled.executor,
        model.layout,
        model.memory.pages,
        context_tokens=config.context_tokens,
        max_step_tokens=config.max_step_tokens,
        max_sequences=config.max_sequences,
        options=_options(config, model.backend.name, model.speculation),
    )


def _options(config: WorkerConfig, backend: str, speculation: Speculation | None) -> EngineOptions:
    return EngineOptions(
        target_step_ms=config.target_step_ms,
        aging_s=config.aging_s,
        prefix_cache=config.prefix_cache,
        chat_retention_s=config.chat_retention_s,
        rest_retention_s=config.rest_retention_s,
        accounting_interval_s=config.accounting_interval_s,
        speculation=speculation,
        model=config.model_digest,
        format=f"{backend} {config.dtype} {config.kv_dtype}",
    )


def _speculation(config: WorkerConfig, layout: CacheLayout) -> Speculation | None:
    """None where nothing can be drafted: a recurrent state cannot be taken back, and prompt lookup is native code."""
    if not config.speculation or any(group.kind == "state" for group in layout.groups):
        return None
    try:
        return Speculation(PromptLookup(), DRAFT_LIMITS)
    except CavectlError:
        return None


# --- the choice of backend --------------------------------------------------------------------------------------------------------


def _check_asked(config: WorkerConfig) -> None:
    if config.backend not in ("auto", "reference", "cpu"):
        raise CavectlError(
            f"the {config.backend} backend is not part of this version",
            hint="use the backend auto, cpu or reference",
            code="device_unavailable",
        )
    if config.backend == "cpu" and config.device != "cpu":
        raise CavectlError(f"the cpu backend does not run on {config.device}", hint="use the device cpu", code="device_unavailable")


def _choose_backend(config: WorkerConfig, spec: ModelSpec) -> tuple[Backend, list[str]]:
    """The backend that will run, and why it is not the native one where that was to be expected."""
    if config.backend == "reference" or config.device != "cpu" or (config.backend == "auto" and config.dtype != "float32"):
        return _reference(config.device), []
    reasons = unsupported(spec, "float16" if config.kv_dtype == "auto" else config.kv_dtype)
    if config.dtype != "float32":
        reasons.append(f"computing in {config.dtype}")
    native = None
    if not reasons:
        try:
            native = _native()
        except CavectlError as error:
            if config.backend == "cpu":
                raise
            reasons.append(error.message)
    elif config.backend == "cpu":
        raise CavectlError(
            f"the cpu backend does not run this model: it has {', '.join(reasons)}",
            hint="use the backend reference",
            code="device_unavailable",
        )
    else:
        reasons = [f"the cpu backend does not have {reason}" for reason in reasons]
    return (native, []) if native is not None else (_reference(config.device), reasons)


def _native() -> Backend:
    from engine.runtime.native_load import NativeBackend

    return NativeBackend()


def _reference(device: str) -> Backend:
    platform.limit_spinning()
    platform.expect_no_numpy()
    try:
        from engine.runtime.torch_load import TorchBackend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise CavectlError(
            "the reference backend needs torch, which is not installed",
            hint="./install.sh --with-torch brings it",
            code="device_unavailable",
        ) from error
    return TorchBackend(device)


def _kv_dtype(config: WorkerConfig, backend: Backend) -> KvDtype:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "float16" if backend.name == "cpu" else "float32"


def _real(kv_dtype: str) -> KvDtype:
    assert kv_dtype != "auto", "resolved when the backend was chosen"
    return kv_dtype  # pyright: ignore[reportReturnType] (a literal of WorkerConfig that is not auto)


# --- growth -----------------------------------------------------------------------------------------------------------------------


class _Growth:
    """A loaded model whose sequences may become longer."""

    def __init__(self, engine: Engine, model: _Model, info: LoadedInfo) -> None:
        self._engine, self._model, self._info = engine, model, info

    def grow(self, context_tokens: int) -> LoadedInfo:
        """What holds once sequences may have `context_tokens`. Raises InvalidRequest, OutOfMemory or NeedsReload."""
        model, spec = self._model, self._model.reading.spec
        if context_tokens <= model.config.context_tokens:
            return self._info
        if context_tokens > spec.context_tokens:
            raise InvalidRequest(
                f"a context of {context_tokens} tokens was asked for, the model holds {spec.context_tokens}",
                hint="ask for a smaller `ctx` (num_ctx)",
            )
        if replace(model.reading.family.spec(model.info.config, context_tokens), notes=()) != replace(spec, notes=()):
            raise NeedsReload("the model's position encoding is made for the context that it was loaded with")
        config = msgspec.structs.replace(model.config, context_tokens=context_tokens)
        reading = replace(model.reading, config=config)
        memory = plan_growth(
            model.backend.needs(reading).workspace_bytes,
            model.layout,
            model.memory,
            config=config,
            held_bytes=self._filled_bytes(),
            available_bytes=model.backend.free_bytes(),
        )
        try:
            self._engine.grow(context_tokens, memory.pages)
        except MemoryError as error:
            raise OutOfMemory(
                f"the system gave no {memory.kv_bytes / 1e9:.2f} GB for the cache of {context_tokens} tokens, which has "
                f"{model.memory.kv_bytes / 1e9:.2f} GB now",
                hint="ask for a smaller context (--ctx), or close other programs",
            ) from error
        self._model = replace(model, config=config, reading=reading, memory=memory)
        self._info = msgspec.structs.replace(
            self._info, context_tokens=context_tokens, kv_bytes=memory.kv_bytes, pages_total=sum(memory.pages)
        )
        return self._info

    def _filled_bytes(self) -> int:
        """Bytes of the present cache that free memory lacks already: on the CPU a page takes memory when it is first written."""
        if self._model.config.device != "cpu":
            return self._model.memory.kv_bytes
        return pages_bytes(self._model.layout, self._engine.held_pages())


def _available_bytes(backend: Backend, config: WorkerConfig) -> int:
    """What is free on the device; less when the config grants less, because others may still take what they were promised."""
    free = backend.free_bytes()
    return free if config.memory_bytes is None else min(free, config.memory_bytes)


# --- what a person is told --------------------------------------------------------------------------------------------------------


def _info(asked: WorkerConfig, model: _Model, reasons: list[str], load_ms: float) -> LoadedInfo:
    config, spec = model.config, model.reading.spec
    return LoadedInfo(
        architecture=model.info.architecture,
        backend=model.backend.name,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        context_tokens=config.context_tokens,
        vocab_size=spec.vocab_size,
        parameters=model.info.parameters,
        weight_bytes=model.filled.weight_bytes,
        kv_bytes=model.memory.kv_bytes,
        pages_total=sum(model.memory.pages),
        page_tokens=PAGE_TOKENS,
        threads=model.reading.threads,
        isa=model.filled.isa,
        drafter=model.speculation.name if model.speculation else "",
        load_ms=load_ms,
        degraded=_degraded(asked, model, reasons),
    )


def _degraded(asked: WorkerConfig, model: _Model, reasons: list[str]) -> list[str]:
    config = model.config
    lines = [*model.info.warnings, *model.reading.spec.notes, *model.filled.warnings]
    if reasons:
        lines.append(f"the reference backend (plain torch) runs this model: {'; '.join(reasons)}")
    lines += model.backend.degraded(model.reading)
    if config.context_tokens < asked.context_tokens:
        lines.append(f"the context is {config.context_tokens} tokens, all the model was made for, not {asked.context_tokens}")
    needed = context_pages(model.layout, config.context_tokens)
    short = [have for have, need in zip(model.memory.pages, needed, strict=True) if have < need]
    if short:
        lines.append(f"the cache has {min(short)} pages, too few for one context of {config.context_tokens} tokens")
    return lines
