"""The executor over native code: a step as plain numbers into one C call, tokens out.

Owned here: writing StepInputs as the words of engine/kernels/cpu/cavectl.h and reading the results. Not here: any check of a step,
which native code does before it changes anything. A step is computed inside `submit`, with the interpreter lock released; `collect`
hands it over. Invariant: a slot's output grows only when the whole step has succeeded. No torch, no numpy.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from engine.cache.layout import CacheLayout
from engine.errors import CavectlError, InvalidRequest, OutOfMemory
from engine.kernels.cpu.buffer import HeldBuffer
from engine.kernels.cpu.lib import load
from engine.models.spec import ModelSpec
from engine.runtime.batch import Row, RowOutput, SamplingSlot, StepInputs, StepOutputs
from engine.runtime.native_plan import plan_bytes
from engine.types import TokenOutput

NOT_FINITE = "the model computed NaN or infinite logits"
NOTHING_ALLOWED = "the grammar and the logit biases leave no token to choose"

_ERROR_BYTES = 512
_INVALID, _MEMORY = -1, -2
_SAMPLED, _NOT_FINITE, _NOTHING_ALLOWED = 1, 2, 3
_SIGNED = 1 << 63


class Packed(Protocol):
    """What is needed of a packed file (engine/weights/packed.py). Its mapping lives as long as the executor."""

    @property
    def tensors(self) -> Any: ...

    @property
    def data(self) -> Any: ...


class NativeExecutor:
    """Implements engine.runtime.executor.Executor on the CPU.

    `pages` is the number of pages of each group of `layout`; `isa` names an instruction set ("": the best this machine has).
    Raises CavectlError when plan and packed file do not belong together, OutOfMemory when there is no memory for the cache.
    """

    depth = 1

    def __init__(
        self,
        spec: ModelSpec,
        packed: Packed,
        layout: CacheLayout,
        pages: Sequence[int],
        *,
        kv_dtype: str = "float16",
        threads: int = 1,
        max_slots: int = 64,
        isa: str = "",
    ) -> None:
        self._library = load().functions
        self._groups, self._vocab = len(layout.groups), spec.vocab_size
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._results = _Results(0, 0, 0)
        plan = plan_bytes(spec, layout, packed.tensors, kv_dtype, max_slots)
        self._view = HeldBuffer(packed.data)
        self._engine = self._library.cavectl_open(
            self._view.address, self._view.bytes, plan, len(plan), _longs(pages), len(pages), threads, isa.encode(), self._error
        )
        if not self._engine:
            self._view.release()
            raise self._refusal(_MEMORY if b"gave no" in self._error.value else _INVALID)

    def submit(self, inputs: StepInputs) -> StepOutputs:
        """Runs the step. Raises InvalidRequest for inputs that break the contract, before anything is changed."""
        words, numbers, masks = _Words(self._groups, (self._vocab + 7) // 8).step(inputs)
        results = self._room(inputs)
        code = self._library.cavectl_step(
            self._engine,
            (ctypes.c_int64 * len(words)).from_buffer(words),
            len(words),
            (ctypes.c_double * len(numbers)).from_buffer(numbers),
            len(numbers) - 1,
            masks,
            len(masks),
            *results.pointers,
            self._error,
        )
        if code:
            raise self._refusal(code)
        return StepOutputs(step=inputs.step, rows=results.rows(len(inputs.rows)))

    def collect(self, ticket: StepOutputs) -> StepOutputs:
        return ticket

    def grow(self, pages: Sequence[int], held: Sequence[Sequence[int]]) -> None:
        counts = [len(of_group) for of_group in held]
        code = self._library.cavectl_grow(
            self._engine, _longs(pages), _longs(list(chain.from_iterable(held))), _longs(counts), len(pages), self._error
        )
        if code:
            raise self._refusal(code)

    def close(self) -> None:
        if self._engine:
            self._library.cavectl_close(self._engine)
            self._engine = None
            self._view.release()

    def keep_logits(self, on: bool = True) -> None:
        """From now on each step leaves the logits of all its tokens, for `logits`. For tests and evaluation."""
        self._library.cavectl_keep_logits(self._engine, int(on))

    def logits(self) -> bytes:
        """float32 [tokens, V] of the last step, after `keep_logits`."""
        rows = self._library.cavectl_logits(self._engine, None, 0)
        target = bytearray(4 * rows * self._vocab)
        self._library.cavectl_logits(self._engine, (ctypes.c_float * (rows * self._vocab)).from_buffer(target), rows)
        return bytes(target)

    def _room(self, inputs: StepInputs) -> _Results:
        rows = len(inputs.rows)
        draws = sum(1 + len(row.tree or ()) for row in inputs.rows)
        top = max((slot.logprobs or 0 for slot in inputs.opened), default=0)
        have = self._results
        if rows > have.max_rows or draws > have.max_draws or top > have.max_top:
            self._results = _Results(max(rows, 2 * have.max_rows), max(draws, 2 * have.max_draws), max(top, have.max_top))
        return self._results

    def _refusal(self, code: int) -> Exception:
        message = self._error.value.decode("utf-8", "replace")
        if code == _INVALID:
            return InvalidRequest(message)
        if code == _MEMORY:
            return OutOfMemory(message, hint="close other programs, or ask for a smaller context (--ctx)")
        return CavectlError(f"the native backend failed: {message}", code="engine_error")


class _Words:
    """Writes a step as int64 words, float64 numbers and mask bytes."""

    def __init__(self, groups: int, mask_bytes: int) -> None:
        self._groups, self._mask_bytes = groups, mask_bytes
        self._words, self._numbers, self._masks = array("q"), array("d"), bytearray()

    def step(self, inputs: StepInputs) -> tuple[array[int], array[float], bytes]:
        """The numbers end with one that counts for nothing: an empty buffer has no address."""
        words = self._words
        words.append(len(inputs.closed))
        words.extend(inputs.closed)
        words.append(len(inputs.opened))
        for slot in inputs.opened:
            self._slot(slot)
        words.append(len(inputs.copies))
        for copy in inputs.copies:
            words.extend(copy)
        words.append(len(inputs.rows))
        for row in inputs.rows:
            self._row(row)
        self._numbers.append(0.0)
        return words, self._numbers, bytes(self._masks)

    def _slot(self, slot: SamplingSlot) -> None:
        for part in slot_words(slot):
            self._words.extend(part)
        self._numbers.extend(slot_numbers(slot))

    def _row(self, row: Row) -> None:
        if row.adapter:
            raise InvalidRequest("adapters are not supported here", code="unsupported")
        if len(row.pages) != self._groups:
            raise InvalidRequest("a row has a negative position, or not one page list for each cache group")
        words, mask = self._words, -1
        if row.mask is not None:
            if len(row.mask) != self._mask_bytes:
                raise InvalidRequest(f"a mask must have {self._mask_bytes} bytes, not {len(row.mask)}")
            mask = len(self._masks)
            self._masks += row.mask
        tree = row.tree or ()
        words.extend((row.position, len(row.tokens), row.sampling, mask, len(tree)))
        words.extend(row.tokens)
        words.extend(tree)
        for pages in row.pages:
            words.append(len(pages))
            words.extend(pages)


def slot_words(slot: SamplingSlot) -> tuple[Sequence[int], ...]:
    """A slot's whole numbers, as cavectl.h lists them. Raises InvalidRequest for one that no 64 bits hold."""
    p = slot.params
    if not 0 <= p.seed < 1 << 64:
        raise InvalidRequest("seed is out of range")
    seed = p.seed - (1 << 64) if p.seed >= _SIGNED else p.seed
    logprobs = -1 if slot.logprobs is None else slot.logprobs
    counts = (len(p.logit_bias), len(slot.stop_ids), len(slot.prompt), len(slot.output))
    head = (slot.slot, slot.choice, seed, p.top_k, p.repeat_last_n, slot.min_tokens, logprobs, *counts)
    return head, list(p.logit_bias), slot.stop_ids, slot.prompt, slot.output


def slot_numbers(slot: SamplingSlot) -> tuple[float, ...]:
    p = slot.params
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    return (p.temperature, p.top_p, p.min_p, *penalties, *p.logit_bias.values())


class _Results:
    """Room for the results of a step: rows, draws of all rows together, and the best tokens of each draw."""

    def __init__(self, rows: int, draws: int, top: int) -> None:
        self.max_rows, self.max_draws, self.max_top = rows, draws, top
        self._drawn = (ctypes.c_int32 * rows)()
        self._status, self._token = (ctypes.c_int32 * draws)(), (ctypes.c_int32 * draws)()
        self._logprob = (ctypes.c_double * draws)()
        self._top_count, self._top_ids = (ctypes.c_int32 * draws)(), (ctypes.c_int32 * (draws * top))()
        self._top_logprobs = (ctypes.c_double * (draws * top))()

    @property
    def pointers(self) -> tuple[Any, ...]:
        of_draws = (self._status, self._token, self._logprob, self.max_top, self._top_count, self._top_ids, self._top_logprobs)
        return (self.max_rows, self._drawn, self.max_draws, *of_draws)

    def rows(self, count: int) -> list[RowOutput]:
        """Of the first `count` rows."""
        outputs: list[RowOutput] = []
        first = 0
        for drawn in self._drawn[:count]:
            outputs.append(self._row(first, drawn))
            first += drawn
        return outputs

    def _row(self, first: int, drawn: int) -> RowOutput:
        if drawn == 0:
            return RowOutput()
        status = self._status[first]
        if status == _NOT_FINITE:
            return RowOutput(error=NOT_FINITE)
        if status == _NOTHING_ALLOWED:
            return RowOutput(error=NOTHING_ALLOWED)
        assert status == _SAMPLED, f"native code gave the status {status}"
        return RowOutput([self._output(draw) for draw in range(first, first + drawn)])

    def _output(self, draw: int) -> TokenOutput:
        logprob, count = self._logprob[draw], self._top_count[draw]
        if math.isnan(logprob):  # not asked for
            return TokenOutput(self._token[draw])
        at = draw * self.max_top
        top = [(self._top_ids[i], self._top_logprobs[i]) for i in range(at, at + count)]
        return TokenOutput(self._token[draw], logprob, top)


def _longs(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
