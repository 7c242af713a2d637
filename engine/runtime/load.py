"""From a WorkerConfig to an Engine that is ready: file -> spec -> memory plan -> weights -> executor -> engine.

Owned here: the order, the choice of backend, and what a person is told about it. Invariant: nothing large is allocated before the
memory plan says that it fits, and whatever runs other than asked has a line in `degraded`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import torch

from engine import platform
from engine.built import Built, EngineOptions, NeedsReload
from engine.cache.layout import CacheLayout, cache_layout
from engine.cache.pool import context_pages, pages_bytes
from engine.engine import Engine
from engine.errors import CavectlError, InvalidRequest, OutOfMemory
from engine.models.families import Family, family_for
from engine.models.spec import ModelSpec, ParameterInfo
from engine.runtime.batch import PAGE_TOKENS
from engine.runtime.memory import MemoryPlan, plan_growth, plan_memory
from engine.runtime.torch_executor import TorchExecutor
from engine.types import LoadedInfo, ModelInfo, WorkerConfig
from engine.weights.loader import load_weights
from engine.weights.source import open_source

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Model:
    """A model in memory, and what was decided for it. `config` is the one asked for, its context cut to what the model can."""

    config: WorkerConfig
    info: ModelInfo
    family: Family
    spec: ModelSpec
    parameters: Mapping[str, ParameterInfo]
    layout: CacheLayout
    memory: MemoryPlan
    weights: dict[str, torch.Tensor]
    warnings: list[str]  # of the file, its config and its tensors


def build_engine(config: WorkerConfig, progress: Progress) -> Built:
    """Load the model. Raises UnsupportedModel, CorruptFile, OutOfMemory (with both numbers), or device_unavailable."""
    started = time.monotonic()
    backend = _choose_backend(config)
    threads = config.threads or platform.physical_cores()
    torch.set_num_threads(threads)
    model = _read(config, progress)
    engine = _engine(model, backend)
    info = _info(config, model, backend, threads, (time.monotonic() - started) * 1e3)
    return Built(engine, info, _Growth(engine, model, info).grow)


def _info(config: WorkerConfig, model: _Model, backend: str, threads: int, load_ms: float) -> LoadedInfo:
    return LoadedInfo(
        architecture=model.info.architecture,
        backend=backend,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        context_tokens=model.config.context_tokens,
        vocab_size=model.spec.vocab_size,
        parameters=model.info.parameters,
        weight_bytes=_resident_bytes(model.weights.values()),
        kv_bytes=model.memory.kv_bytes,
        pages_total=sum(model.memory.pages),
        page_tokens=PAGE_TOKENS,
        threads=threads,
        load_ms=load_ms,
        degraded=_degraded(config, model),
    )


class _Growth:
    """A loaded model whose sequences may become longer."""

    def __init__(self, engine: Engine, model: _Model, info: LoadedInfo) -> None:
        self._engine, self._model, self._info = engine, model, info

    def grow(self, context_tokens: int) -> LoadedInfo:
        """What holds once sequences may have `context_tokens`. Raises InvalidRequest, OutOfMemory or NeedsReload."""
        model = self._model
        if context_tokens <= model.config.context_tokens:
            return self._info
        if context_tokens > model.spec.context_tokens:
            raise InvalidRequest(
                f"a context of {context_tokens} tokens was asked for, the model holds {model.spec.context_tokens}",
                hint="ask for a smaller `ctx` (num_ctx)",
            )
        if replace(model.family.spec(model.info.config, context_tokens), notes=()) != replace(model.spec, notes=()):
            raise NeedsReload("the model's position encoding is made for the context that it was loaded with")
        config = msgspec.structs.replace(model.config, context_tokens=context_tokens)
        memory = plan_growth(
            model.spec,
            model.parameters,
            model.layout,
            model.memory,
            config=config,
            held_bytes=self._filled_bytes(),
            available_bytes=_free_bytes(config.device),
        )
        try:
            self._engine.grow(context_tokens, memory.pages)
        except MemoryError as error:
            raise OutOfMemory(
                f"the system gave no {memory.kv_bytes / 1e9:.2f} GB for the cache of {context_tokens} tokens, which has "
                f"{model.memory.kv_bytes / 1e9:.2f} GB now",
                hint="ask for a smaller context (--ctx), or close other programs",
            ) from error
        self._model = replace(model, config=config, memory=memory)
        self._info = msgspec.structs.replace(
            self._info, context_tokens=context_tokens, kv_bytes=memory.kv_bytes, pages_total=sum(memory.pages)
        )
        return self._info

    def _filled_bytes(self) -> int:
        """Bytes of the present cache that free memory lacks already: on the CPU a page takes memory when it is first written."""
        if self._model.config.device != "cpu":
            return self._model.memory.kv_bytes
        return pages_bytes(self._model.layout, self._engine.held_pages())


def _read(config: WorkerConfig, progress: Progress) -> _Model:
    progress("reading", 0.0)
    source = open_source(config.model_path, config.format)
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, config.context_tokens)
        config = msgspec.structs.replace(config, context_tokens=min(config.context_tokens, spec.context_tokens))
        layout = cache_layout(spec, config.kv_dtype)
        parameters = family.parameters(spec)
        available = _available_bytes(config)
        memory = plan_memory(spec, parameters, source.tensors, layout, config=config, available_bytes=available)
        warnings = [*source.info.warnings, *spec.notes]
        weights = load_weights(source, spec, parameters, config.dtype, config.device, progress, warnings.append)
        return _Model(config, source.info, family, spec, parameters, layout, memory, weights, warnings)
    finally:
        source.close()


def _engine(model: _Model, backend: str) -> Engine:
    config, pages = model.config, model.memory.pages
    executor = TorchExecutor(
        model.spec,
        model.weights,
        model.layout,
        pages,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=config.device,
        max_slots=config.max_sequences,
    )
    return Engine(
        executor,
        model.layout,
        pages,
        context_tokens=config.context_tokens,
        max_step_tokens=config.max_step_tokens,
        max_sequences=config.max_sequences,
        options=_options(config, backend),
    )


def _options(config: WorkerConfig, backend: str) -> EngineOptions:
    return EngineOptions(
        target_step_ms=config.target_step_ms,
        aging_s=config.aging_s,
        prefix_cache=config.prefix_cache,
        chat_retention_s=config.chat_retention_s,
        rest_retention_s=config.rest_retention_s,
        accounting_interval_s=config.accounting_interval_s,
        model=config.model_digest,
        format=f"{backend} {config.dtype} {config.kv_dtype}",
    )


def _choose_backend(config: WorkerConfig) -> str:
    """The backend that will run, after checking that the device is there."""
    if config.backend not in ("auto", "reference"):
        raise CavectlError(
            f"the {config.backend} backend is not part of this version",
            hint="use the backend auto or reference",
            code="device_unavailable",
        )
    if config.device != "cpu" and not (config.device.startswith("cuda") and torch.cuda.is_available()):
        raise CavectlError(f"there is no device {config.device} here", hint="use the device cpu", code="device_unavailable")
    return "reference"


def _available_bytes(config: WorkerConfig) -> int:
    """What is free on the device; less when the config grants less, because others may still take what they were promised."""
    free = _free_bytes(config.device)
    return free if config.memory_bytes is None else min(free, config.memory_bytes)


def _free_bytes(device: str) -> int:
    return platform.available_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def _resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, shared ones once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def _degraded(asked: WorkerConfig, model: _Model) -> list[str]:
    config, info = model.config, model.info
    lines = list(model.warnings)
    if asked.backend == "auto":
        lines.append("the reference backend (plain torch) runs this model: this version has no faster one")
    if info.format == "gguf" and info.quantization not in ("F32", "F16", "BF16"):
        lines.append(f"{info.quantization} weights are unpacked to {config.dtype} in memory")
    if config.context_tokens < asked.context_tokens:
        lines.append(f"the context is {config.context_tokens} tokens, all the model was made for, not {asked.context_tokens}")
    short = [
        have
        for have, need in zip(model.memory.pages, context_pages(model.layout, config.context_tokens), strict=True)
        if have < need
    ]
    if short:
        lines.append(f"the cache has {min(short)} pages, too few for one context of {config.context_tokens} tokens")
    return lines
