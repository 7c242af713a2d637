"""Drives a TorchExecutor by hand: page lists, rows and slots for tests, without the engine's allocator or scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.cache.layout import KvDtype, cache_layout
from engine.models.families import family_for
from engine.models.spec import ModelSpec
from engine.runtime.batch import PAGE_TOKENS, Row, RowOutput, SamplingSlot, StepInputs
from engine.runtime.torch_executor import ComputeDtype, TorchExecutor
from engine.types import SamplingParams
from tests.fixtures.tiny_rand import TinyRand

GREEDY = SamplingParams(temperature=0.0)


def our_weights(model: TinyRand, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """TinyRand's tensors by our names; what engine/weights does for real files."""
    weights = {}
    for name, info in family_for(model.config["model_type"]).parameters(spec).items():
        found = [model.tensors[n] for n in info.names if n in model.tensors]
        if found:
            weights[name] = torch.cat(found).to(dtype)
            assert tuple(weights[name].shape) == info.shape
    return weights


def forward(executor: TorchExecutor, row: Row) -> torch.Tensor:
    """Logits at every token of one row [n, V], from the executor's decoder; what the cache keeps of the row is written."""
    with torch.inference_mode():
        batch = replace(executor._batch([row], {}), sampled=torch.arange(len(row.tokens)))
        logits, states = executor._decoder.forward(batch, executor._cache)
        for state in states:
            executor._ops.write_states(state.values, state.plane, state.pages)
        return logits


@dataclass
class Line:
    """One sequence under way: its pages in each group, and how much of it the cache holds."""

    id: int
    slot: SamplingSlot
    pages: list[list[int]]
    tokens: list[int]
    cached: int = 0
    opened: bool = False


@dataclass
class Harness:
    model: TinyRand
    dtype: ComputeDtype = "float64"
    kv_dtype: KvDtype | None = None
    total_pages: int = 256
    context_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv_dtype = self.kv_dtype or self.dtype
        self.spec = family_for(self.model.config["model_type"]).spec(self.model.config, self.context_tokens)
        weights = our_weights(self.model, self.spec, getattr(torch, self.dtype))
        layout = cache_layout(self.spec, kv_dtype)
        self.groups = len(layout.groups)
        self.executor = TorchExecutor(
            self.spec, weights, layout, [self.total_pages] * self.groups, dtype=self.dtype, kv_dtype=kv_dtype, **self.options
        )
        self.free = [list(range(self.total_pages)) for _ in range(self.groups)]
        self.lines = self.steps = 0

    def line(self, prompt: Sequence[int], params: SamplingParams = GREEDY, choice: int = 0, **slot: Any) -> Line:
        self.lines += 1
        opened = SamplingSlot(slot=self.lines % 64, params=params, choice=choice, prompt=list(prompt), **slot)
        return Line(self.lines, opened, [[] for _ in range(self.groups)], [*prompt, *opened.output])

    def row(self, line: Line, count: int | None = None, **fields: Any) -> Row:
        """The next `count` uncached tokens of the line (None: all), sampled when they are the last."""
        tokens = line.tokens[line.cached :][:count]
        end = line.cached + len(tokens)
        for pages, free in zip(line.pages, self.free, strict=True):
            while len(pages) * PAGE_TOKENS < end:
                pages.append(free.pop(7 * self.steps % len(free)))
        sampling = line.slot.slot if end == len(line.tokens) else -1
        pages = [list(p) for p in line.pages]
        return Row(sequence=line.id, tokens=tokens, position=line.cached, pages=pages, sampling=sampling, **fields)

    def step(self, work: Sequence[tuple[Line, int | None]]) -> list[RowOutput]:
        rows = [self.row(line, count) for line, count in work]
        opened = [line.slot for line, _ in work if not line.opened]
        self.steps += 1
        inputs = StepInputs(step=self.steps, rows=rows, opened=opened)
        outputs = self.executor.collect(self.executor.submit(inputs)).rows
        for (line, _), row, output in zip(work, rows, outputs, strict=True):
            line.opened = True
            line.cached += len(row.tokens)
            line.tokens += [t.id for t in output.tokens]
        return outputs

    def generate(self, prompt: Sequence[int], count: int, chunk: int | None = None, **line: Any) -> list[int]:
        one = self.line(prompt, **line)
        while len(one.tokens) < len(prompt) + count:
            self.step([(one, chunk)])
        return one.tokens[len(prompt) :]

    def poison(self) -> None:
        """NaN in every free and every used slot alike: call before anything is cached."""
        for planes in self.executor._planes:
            for plane in planes.values():
                plane.fill_(-128 if plane.dtype == torch.int8 else torch.nan)

    def logits(self, line: Line, chunk: int | None = None) -> torch.Tensor:
        """Feeds the rest of the line in chunks; logits at each of those positions [n, V], taken from the decoder itself."""
        found = []
        while line.cached < len(line.tokens):
            row = self.row(line, chunk)
            found.append(forward(self.executor, row))
            line.cached += len(row.tokens)
        return torch.cat(found)
