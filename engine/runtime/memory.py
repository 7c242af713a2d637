"""What a model needs in memory, against what there is: decided before anything large is allocated.

Owned here: the estimate of a load's peak and the share of free memory that becomes cache. Not here: measuring (engine/platform.py),
turning bytes into pages (engine/cache/pool.py). Invariant: a plan fits in the memory given, or OutOfMemory says both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.cache.layout import DTYPE_BYTES, CacheLayout
from engine.cache.pool import context_pages, pages_bytes, pages_for_budget, state_pages
from engine.errors import OutOfMemory
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, ParameterInfo
from engine.types import WorkerConfig

CACHE_SHARE = 0.5  # of what the weights leave free, at most; the rest stays with the machine's other programs
FULL_CONTEXTS = 4  # what the cache holds when nobody says; shorter sequences share it, so that many more of them run at once
LOGITS_BYTES = 24  # per logit of a step: float32 logits, float64 probabilities, their running sum


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weight_bytes: int
    workspace_bytes: int  # the most that a step, or unpacking one tensor, needs for a moment
    pages: tuple[int, ...]  # per cache group
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a backend takes besides the cache."""

    weight_bytes: int
    workspace_bytes: int


def reference_needs(
    spec: ModelSpec, parameters: Mapping[str, ParameterInfo], present: Container[str], config: WorkerConfig
) -> Needs:
    return Needs(weight_bytes(parameters, present, config.dtype), workspace_bytes(spec, parameters, config))


def weight_bytes(parameters: Mapping[str, ParameterInfo], present: Container[str], dtype: str) -> int:
    """Bytes of the parameters in `dtype`. Optional ones count when the checkpoint has them (`present` holds its names)."""
    kept = [p for p in parameters.values() if not p.optional or all(name in present for name in p.names)]
    return sum(math.prod(p.shape) for p in kept) * DTYPE_BYTES[dtype]


def workspace_bytes(spec: ModelSpec, parameters: Mapping[str, ParameterInfo], config: WorkerConfig) -> int:
    """An upper bound of what comes and goes: a step's activations, or one tensor as it is unpacked to float32 and converted.

    A step of T tokens over a context of C has 3 arrays of [Hq, T, C] in attention, 3 of [T, S] in a recurrence (of float64 at
    most), or 3 of [T, F] in the feed-forward layer.
    """
    number = max(4, DTYPE_BYTES[config.dtype])
    tokens = config.max_step_tokens
    widest = max(max(_mixer_width(layer, config.context_tokens), layer.ffn.hidden) for layer in spec.layers)
    step = tokens * (3 * widest + 8 * spec.hidden) * number + min(config.max_sequences, tokens) * spec.vocab_size * LOGITS_BYTES
    largest = max(math.prod(p.shape) for p in parameters.values())
    return max(step, largest * (4 + number))


def plan_memory(needs: Needs, layout: CacheLayout, *, config: WorkerConfig, available_bytes: int) -> MemoryPlan:
    """Pages for the cache, after weights and workspace: as many bytes as `config` asks for, else some full contexts, if free.

    Raises OutOfMemory when it does not fit, or, without a size asked for, when not one sequence of full context would.
    """
    weights, workspace = needs.weight_bytes, needs.workspace_bytes
    free = available_bytes - weights - workspace
    one = pages_bytes(layout, context_pages(layout, config.context_tokens))
    least = one if config.kv_memory_bytes is None else config.kv_memory_bytes
    if free < least:
        raise OutOfMemory(
            f"the model needs {_gb(weights + workspace + least)} of memory (weights {_gb(weights)}, cache {_gb(least)}, "
            f"work {_gb(workspace)}) and {_gb(available_bytes)} are available",
            hint="close other programs, take a smaller model, or a smaller context (CAVECTL_CONTEXT_TOKENS, --ctx)",
        )
    budget = config.kv_memory_bytes
    if budget is None:
        budget = max(one, min(_comfortable_bytes(layout, config), int(free * CACHE_SHARE)))
    pages = _pages(layout, budget, config)
    if not all(pages):
        raise OutOfMemory(
            f"{budget} bytes of cache are less than one page, which takes {sum(g.bytes_per_page for g in layout.groups)}",
            hint="give the cache more memory with --kv-memory",
        )
    return MemoryPlan(weights, workspace, pages, pages_bytes(layout, pages))


def plan_growth(
    workspace: int, layout: CacheLayout, present: MemoryPlan, *, config: WorkerConfig, held_bytes: int, available_bytes: int
) -> MemoryPlan:
    """Pages for sequences of `config.context_tokens` in a model that is loaded as `present` says, `held_bytes` of its cache filled.
    `workspace`: bytes that a step then needs.

    No group gets fewer than it has. The weights are there already; what is free must hold the rest of the cache and the work.
    Raises OutOfMemory when one full context does not fit, or not in the cache size that was asked for.
    """
    one = context_pages(layout, config.context_tokens)
    least = tuple(max(pair) for pair in zip(one, present.pages, strict=True))
    short = [(need, have) for need, have in zip(one, present.pages, strict=True) if need > have]
    if config.kv_memory_bytes is not None and short:
        need, have = short[0]
        raise OutOfMemory(
            f"a context of {config.context_tokens} tokens needs {need} cache pages and there are {have}",
            hint="give the cache more memory with --kv-memory",
        )
    free = available_bytes + held_bytes - workspace
    if config.memory_bytes is not None:
        free = min(free, config.memory_bytes - present.weight_bytes - workspace)
    if free < pages_bytes(layout, least):
        raise OutOfMemory(
            f"a context of {config.context_tokens} tokens needs {_gb(pages_bytes(layout, least))} of cache and "
            f"{_gb(max(0, free))} are available",
            hint="ask for a smaller context (--ctx), or close other programs",
        )
    budget = min(_comfortable_bytes(layout, config), int(free * CACHE_SHARE))
    wanted = _pages(layout, budget, config) if config.kv_memory_bytes is None else least
    pages = tuple(max(pair) for pair in zip(least, wanted, strict=True))
    return MemoryPlan(present.weight_bytes, workspace, pages, pages_bytes(layout, pages))


def _mixer_width(layer: LayerSpec, context_tokens: int) -> int:
    """Numbers per token of the widest array in a layer's mixer."""
    mixer = layer.mixer
    return mixer.heads * context_tokens if isinstance(mixer, AttentionSpec) else 2 * mixer.size


def _comfortable_bytes(layout: CacheLayout, config: WorkerConfig) -> int:
    """Some full contexts, and all the states that can be of use: those of a state group do not grow with the context."""
    one = context_pages(layout, config.context_tokens)
    states = state_pages(config.max_sequences)
    pages = [states if group.kind == "state" else FULL_CONTEXTS * n for group, n in zip(layout.groups, one, strict=True)]
    return pages_bytes(layout, pages)


def _pages(layout: CacheLayout, budget: int, config: WorkerConfig) -> tuple[int, ...]:
    return pages_for_budget(
        layout,
        budget,
        context_tokens=config.context_tokens,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
