"""One sequence as the scheduler and the engine know it: its tokens, how far they are computed, what it holds.

    tokens:  [ prompt .............. | output ...... ] (in flight)
               0 .. computed    confirmed in the cache (from 0 on, or from the prefix that the lease found there)
               computed .. scheduled    in steps submitted and not yet collected
Invariant: computed <= scheduled, and the `in_flight` draws not yet collected are one for each token from the last one on.
A sequence is changed only by the scheduler (place, lease, slot) and the engine (tokens, times).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.lease import Lease
from engine.cache.radix import Namespace
from engine.runtime.batch import SamplingSlot
from engine.types import EngineRequest, SequenceUsage

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    id: int  # also the order of arrival: lower is older
    request: EngineRequest
    choice: int
    limit: int  # output tokens at most
    namespace: Namespace
    arrived: float  # monotonic seconds, like all times here
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    lease: Lease | None = None  # while it runs
    computed: int = 0
    scheduled: int = 0
    in_flight: int = 0
    drawn_in: int = -1  # last step that a draw was submitted in
    epoch: int = 0  # moves when the work in flight becomes worthless: preempted, finished
    slot: int = NO_SLOT
    slot_open: bool = False  # the executor holds this sequence's sampling state
    promoted: int = 0  # priority classes that waiting has won it
    last_served: float = 0.0  # last time that a step took tokens of it, at first its arrival
    leader: Sequence | None = None  # a running sequence that computes a prefix which this one waits to share ...
    leader_tokens: int = 0  # ... up to this many tokens
    drafted_tokens: int = 0  # nodes of all its draft trees, and those that were right
    accepted_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache when it first started
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.last_served = self.arrived

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def stop_ids(self) -> list[int]:
        return self.request.stop_ids

    @property
    def settled(self) -> bool:
        """Nothing of it is on its way."""
        return self.scheduled == self.computed

    def pending(self, step: int) -> int:
        """Tokens that could be fed in `step`: those not scheduled yet, or the one draw of the step before."""
        if self.scheduled < len(self.tokens):
            return len(self.tokens) - self.scheduled
        more = self.in_flight > 0 and self.output_tokens + self.in_flight < self.limit
        return 1 if more and self.drawn_in == step - 1 else 0

    def sampling_slot(self) -> SamplingSlot:
        request = self.request
        return SamplingSlot(
            slot=self.slot,
            params=request.sampling,
            choice=self.choice,
            prompt=request.prompt,
            output=self.tokens[self.prompt_tokens :],
            stop_ids=request.stop_ids,
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
        )

    def usage(self, now: float) -> SequenceUsage:
        """The closing account. Phases that never came are 0 long; the phase that `now` cuts short ends there."""
        started = now if self.first_scheduled is None else self.first_scheduled
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        return SequenceUsage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            queue_ms=(started - self.arrived) * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(last - first) * 1e3,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
