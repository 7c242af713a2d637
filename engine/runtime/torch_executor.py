"""The executor over torch: steps as data in, tokens out, through the one decoder and a backend's Ops.

Owned here: the KV planes, the open sampling slots, and the checks that keep a malformed step from touching either. Not here: which
pages belong to whom (engine/cache), what to run (engine/scheduler). A step is computed inside `submit`; `collect` hands it over.
Invariant: an open slot's output grows, and a recurrent state moves, only when the whole step has succeeded, so a failed step can
be submitted again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

from engine.cache.layout import CacheLayout, KvDtype, cache_layout
from engine.errors import InvalidRequest
from engine.kernels.ops import AttentionRow, LayerCache, Ops, RecurrenceRow, layer_cache
from engine.kernels.reference import ReferenceOps
from engine.models.decoder import AttentionBatch, Cache, Decoder, DeviceBatch, StateBatch
from engine.models.spec import ModelSpec
from engine.runtime.batch import FROM_PREVIOUS, NO_PAGE, PAGE_TOKENS, Row, RowOutput, StepInputs, StepOutputs
from engine.runtime.sampler import SamplingState, sample
from engine.speculative.verify import ROOT, walk
from engine.types import TokenOutput

ComputeDtype = Literal["float64", "float32", "bfloat16", "float16"]

NOT_FINITE = "the model computed NaN or infinite logits"
NOTHING_ALLOWED = "the grammar and the logit biases leave no token to choose"


class TorchExecutor:
    """Implements engine.runtime.executor.Executor.

    `weights` are by our names, in `dtype`, on `device`; `pages` is the number of pages of each group of `layout`.
    """

    depth = 1

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        layout: CacheLayout,
        pages: Sequence[int],
        *,
        dtype: ComputeDtype = "float32",
        kv_dtype: KvDtype = "float32",
        device: str = "cpu",
        max_slots: int = 64,
        ops: Ops | None = None,
    ) -> None:
        assert layout == cache_layout(spec, kv_dtype), "the cache layout is not this model's in this kv_dtype"
        assert weights["embed"].dtype == getattr(torch, dtype), "the weights are not in the dtype asked for"
        self._spec, self._layout, self._pages = spec, layout, tuple(pages)
        self._device, self._max_slots = torch.device(device), max_slots
        self._ops: Ops = ops or ReferenceOps(self._device)
        self._decoder = Decoder(spec, weights, self._ops)
        self._planes = self._allocate(self._pages)
        self._cache = self._layers_of(self._planes)
        self._slots: dict[int, SamplingState] = {}
        self._keeps_logits, self._kept = False, b""

    def submit(self, inputs: StepInputs) -> StepOutputs:
        """Runs the step. Raises InvalidRequest for inputs that break the contract, before anything is changed."""
        slots = self._slots_after(inputs)
        for row in inputs.rows:
            self._check(row, slots)
        self._check_states(inputs.rows)
        self._check_copies(inputs.copies)
        with torch.inference_mode():
            self._copy(inputs.copies)
            rows = self._run(inputs.rows, slots) if inputs.rows else []
        self._slots = slots
        for row, output in zip(inputs.rows, rows, strict=True):
            for token in output.tokens:
                slots[row.sampling].append(token.id)
        return StepOutputs(step=inputs.step, rows=rows)

    def collect(self, ticket: StepOutputs) -> StepOutputs:
        return ticket

    def grow(self, pages: Sequence[int], held: Sequence[Sequence[int]]) -> None:
        """All planes are reserved before the first is filled, and filling takes no memory: what fails, fails with all as it was.

        Each old plane goes as soon as it is copied, so that the pages held are there twice in one plane at most.
        """
        planes, old = self._allocate(pages), self._planes
        self._cache, self._planes = Cache((), ()), ()
        for index, group in enumerate(planes):
            runs = _runs(held[index])
            for key, plane in group.items():
                source = old[index].pop(key)
                for first, end in runs:
                    plane[first:end].copy_(source[first:end])
        self._pages, self._planes = tuple(pages), planes
        self._cache = self._layers_of(planes)

    def keep_logits(self, on: bool) -> None:
        """For evaluation: from now on each step leaves the logits of all its tokens, of sampled ones or not."""
        self._keeps_logits, self._kept = on, b""

    def logits(self) -> bytes:
        """float32 [T][vocabulary] of the last step; empty when they are not kept."""
        return self._kept

    def close(self) -> None:
        self._planes, self._slots, self._cache = (), {}, Cache((), ())

    def _allocate(self, pages: Sequence[int]) -> tuple[dict[tuple[int, str], Tensor], ...]:
        return tuple(
            {(p.layer, p.name): self._ops.allocate_plane(n, p, group.page_slots) for p in group.planes}
            for group, n in zip(self._layout.groups, pages, strict=True)
        )

    def _run(self, rows: Sequence[Row], slots: Mapping[int, SamplingState]) -> list[RowOutput]:
        logits, states = self._decoder.forward(self._batch(rows, slots), self._cache)
        if self._keeps_logits:
            kept = logits.to(device="cpu", dtype=torch.float32).contiguous()
            self._kept = ctypes.string_at(kept.data_ptr(), kept.nbytes)
            logits = logits[self._ids(_scored(rows))]
        drawn = self._draws(rows, slots, logits)
        for state in states:
            self._ops.write_states(state.values, state.plane, state.pages)
        return drawn

    def _draws(self, rows: Sequence[Row], slots: Mapping[int, SamplingState], logits: Tensor) -> list[RowOutput]:
        """Of each row; drafts that were right are moved to where their positions say."""
        finite = self._ops.finite(logits).tolist()
        drawn: list[RowOutput] = []
        first = 0
        for row in rows:
            if row.sampling < 0:
                drawn.append(RowOutput())
                continue
            last = first + 1 + len(row.tree or ())
            output, path = _draw(row, logits[first:last], finite[first:last], slots[row.sampling])
            self._keep(row, path)
            drawn.append(output)
            first = last
        return drawn

    def _keep(self, row: Row, path: Sequence[int]) -> None:
        """The row's drafts `path` were right, one after another."""
        behind = row.position + len(row.tokens) - len(row.tree or ())
        moves = [(behind + node, behind + length) for length, node in enumerate(path) if node != length]
        if not moves:
            return
        for pages, planes in zip(row.pages, self._planes, strict=True):
            sources, targets = (
                self._ids(pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS for position in positions)
                for positions in zip(*moves, strict=True)
            )
            for plane in planes.values():
                self._ops.copy_slots(plane, sources, targets)

    def _batch(self, rows: Sequence[Row], slots: Mapping[int, SamplingState]) -> DeviceBatch:
        tokens = [slots[r.sampling].tokens[-1:] if r.tokens == [FROM_PREVIOUS] else r.tokens for r in rows]
        ends, total = [], 0
        for row in rows:
            total += len(row.tokens)
            ends.append(total)
        adapters = [[r.adapter] * len(r.tokens) for r in rows]
        return DeviceBatch(
            tokens=self._ids(chain.from_iterable(tokens)),
            positions=self._ids(chain.from_iterable(map(_positions, rows))),
            sampled=self._ids(range(total) if self._keeps_logits else _scored(rows)),
            groups=tuple(self._group_batch(rows, ends, group) for group in range(len(self._layout.groups))),
            adapters=self._ids(chain.from_iterable(adapters)) if any(r.adapter for r in rows) else None,
        )

    def _group_batch(self, rows: Sequence[Row], ends: Sequence[int], group: int) -> AttentionBatch | StateBatch:
        if self._layout.groups[group].kind == "state":
            return self._state_batch(rows, ends, group)
        attention, slots = [], []
        for row, end in zip(rows, ends, strict=True):
            pages, count = row.pages[group], len(row.tokens)
            attention.append(AttentionRow(end - count, count, row.position, pages, row.tree))
            written = range(row.position, row.position + count)
            slots.extend(pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in written)
        plan = self._ops.plan_attention(attention, self._layout.groups[group].window_tokens)
        return AttentionBatch(self._ids(slots), plan)

    def _state_batch(self, rows: Sequence[Row], ends: Sequence[int], group: int) -> StateBatch:
        recurrence = [
            RecurrenceRow(end - len(row.tokens), len(row.tokens), row.pages[group][0] if row.position else None)
            for row, end in zip(rows, ends, strict=True)
        ]
        return StateBatch(self._ids(row.pages[group][0] for row in rows), self._ops.plan_recurrence(recurrence))

    def _ids(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _slots_after(self, inputs: StepInputs) -> dict[int, SamplingState]:
        """The open slots that the step works with: a slot closed and opened in one step is the new one."""
        slots = {slot: state for slot, state in self._slots.items() if slot not in inputs.closed}
        for opened in inputs.opened:
            if not 0 <= opened.slot < self._max_slots:
                raise InvalidRequest(f"sampling slot {opened.slot} is outside 0..{self._max_slots - 1}")
            slots[opened.slot] = SamplingState(opened, self._spec.vocab_size)
        return slots

    def _check(self, row: Row, slots: Mapping[int, SamplingState]) -> None:
        vocab, count = self._spec.vocab_size, len(row.tokens)
        if row.sampling >= 0 and row.sampling not in slots:
            raise InvalidRequest(f"sampling slot {row.sampling} is not open")
        if row.tokens == [FROM_PREVIOUS]:
            if row.sampling < 0 or not slots[row.sampling].output_tokens:
                raise InvalidRequest("a row continues from a token that was never sampled")
        elif not count or not all(0 <= t < vocab for t in row.tokens):
            raise InvalidRequest(f"a row has no tokens, or one outside the vocabulary of {vocab}")
        if row.adapter:
            raise InvalidRequest("adapters are not supported here", code="unsupported")
        if row.mask is not None and len(row.mask) != (vocab + 7) // 8:
            raise InvalidRequest(f"a mask must have {(vocab + 7) // 8} bytes, not {len(row.mask)}")
        if row.tree is not None and (len(row.tree) >= count or any(not -1 <= p < i for i, p in enumerate(row.tree))):
            raise InvalidRequest("a draft tree must follow a plain token, parents before children")
        if row.tree and row.sampling < 0:
            raise InvalidRequest("a draft tree needs a sampling slot")
        if row.tree and row.mask is not None:
            raise InvalidRequest("a draft tree and a mask do not go together", code="unsupported")
        self._check_pages(row)

    def _check_pages(self, row: Row) -> None:
        end = row.position + len(row.tokens)
        if row.position < 0 or len(row.pages) != len(self._layout.groups):
            raise InvalidRequest("a row has a negative position, or not one page list for each cache group")
        for group, pages, total in zip(self._layout.groups, row.pages, self._pages, strict=True):
            if group.kind == "state":
                if len(pages) != 1 or not 0 <= pages[0] < total:
                    raise InvalidRequest(f"a row needs one state of the pool of {total}")
                continue
            first = 0 if group.window_tokens is None else max(0, row.position - group.window_tokens + 1)
            needed = pages[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
            if len(pages) * PAGE_TOKENS < end or not all(0 <= p < total for p in needed):
                raise InvalidRequest(f"a row's pages do not hold its positions up to {end - 1}")
            if any(p != NO_PAGE and not 0 <= p < total for p in pages):
                raise InvalidRequest(f"a page is outside the pool of {total}")

    def _check_states(self, rows: Sequence[Row]) -> None:
        """Two rows cannot move one state, and a tree of drafts has no single one to leave behind."""
        for index, group in enumerate(self._layout.groups):
            if group.kind != "state":
                continue
            pages = [row.pages[index][0] for row in rows]
            if len(set(pages)) < len(pages):
                raise InvalidRequest("two rows have the same state")
            if any(row.tree is not None for row in rows):
                raise InvalidRequest("a draft tree needs a model without recurrent layers", code="unsupported")

    def _check_copies(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for group, source, target in copies:
            if not (0 <= group < len(self._pages) and 0 <= source < self._pages[group] and 0 <= target < self._pages[group]):
                raise InvalidRequest("a page copy is outside the pool")
        targets = {(group, target) for group, _, target in copies}
        if len(targets) < len(copies) or any((group, source) in targets for group, source, _ in copies):
            raise InvalidRequest("a page is the target of two copies, or both source and target")

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for group, planes in enumerate(self._planes):
            pairs = [(source, target) for g, source, target in copies if g == group]
            if pairs:
                sources, targets = self._ids(s for s, _ in pairs), self._ids(t for _, t in pairs)
                for plane in planes.values():
                    self._ops.copy_pages(plane, sources, targets)

    def _layers_of(self, planes: Sequence[Mapping[tuple[int, str], Tensor]]) -> Cache:
        layers: dict[int, LayerCache | Tensor] = {}
        group_of: dict[int, int] = {}
        for index, group in enumerate(self._layout.groups):
            for layer in group.layers:
                found = {name: plane for (of, name), plane in planes[index].items() if of == layer}
                layers[layer] = found["state"] if group.kind == "state" else layer_cache(found)
                group_of[layer] = index
        order = range(len(self._spec.layers))
        return Cache(tuple(layers[i] for i in order), tuple(group_of[i] for i in order))


def _scored(rows: Sequence[Row]) -> list[int]:
    """Where the last plain token of each sampled row, and its drafts, stand among the tokens of the step."""
    ends = accumulate(len(row.tokens) for row in rows)
    spans = [(end - 1 - len(row.tree or ()), end) for row, end in zip(rows, ends, strict=True) if row.sampling >= 0]
    return [token for first, end in spans for token in range(first, end)]


def _draw(row: Row, logits: Tensor, finite: Sequence[bool], state: SamplingState) -> tuple[RowOutput, list[int]]:
    """The row's draws, and its drafts that were right. Logits [1 + drafts, V]: of the last plain token and of each draft.

    Where a draw after the first cannot be made, nothing is said of it: the next step will, as it would have without drafts.
    """
    parents, drafts = row.tree or [], row.tokens[len(row.tokens) - len(row.tree or ()) :]
    if not finite[0]:
        return RowOutput(error=NOT_FINITE), []
    before = state.output_tokens

    def draw(node: int) -> TokenOutput | None:
        if node != ROOT:
            state.append(drafts[node])
        return sample(logits[node + 1], state, row.mask) if finite[node + 1] else None

    tokens, path = walk(parents, drafts, draw, lambda token: token.id)
    state.cut(before)  # the whole step has to succeed first
    return (RowOutput(tokens) if tokens else RowOutput(error=NOTHING_ALLOWED)), path


def _runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers among `pages`, as (first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


def _positions(row: Row) -> list[int]:
    """Logical positions: a draft stands its depth behind the last plain token."""
    tree = row.tree or []
    plain = len(row.tokens) - len(tree)
    positions = list(range(row.position, row.position + plain))
    for parent in tree:
        positions.append(positions[plain + parent if parent >= 0 else plain - 1] + 1)
    return positions
