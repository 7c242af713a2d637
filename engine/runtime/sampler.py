"""The sampler: one row of logits and one sequence's parameters to one token. The reference for every backend.

Owned here: the exact meaning of SamplingParams. Everything from the first bias on is float64. Where an order matters it is
(logit descending, id ascending), so ties at an edge go to the lower id; the draw is the inverse of the cumulative
distribution over the survivors in id order. Invariant: a token is a function of the logits, the parameters, the sequence so far
and (seed, choice, position), and of nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.runtime.batch import SamplingSlot
from engine.runtime.philox import uniform
from engine.types import SamplingParams, TokenOutput

_FIRST_LOOK = 256  # most nuclei are smaller; a larger one is looked for in growing steps


class SamplingState:
    """What one sampled sequence has said so far, and how it picks. Built from a slot; grows by `append`."""

    def __init__(self, slot: SamplingSlot, vocab_size: int) -> None:
        check(slot.params, vocab_size)
        self.params, self.choice, self.logprobs = slot.params, slot.choice, slot.logprobs
        self.min_tokens, self.stop_ids = slot.min_tokens, [i for i in slot.stop_ids if i < vocab_size]
        self.tokens = [*slot.prompt, *slot.output]
        self._prompt_tokens = len(slot.prompt)
        self.counts = Counter(slot.output)
        if any(not 0 <= t < vocab_size for t in self.tokens):
            raise InvalidRequest(f"a token id is outside the vocabulary of {vocab_size}")

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self._prompt_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] += 1

    def cut(self, output_tokens: int) -> None:
        """Forget what was appended beyond so many output tokens."""
        while self.output_tokens > output_tokens:
            token = self.tokens.pop()
            self.counts[token] -= 1
            if not self.counts[token]:
                del self.counts[token]

    def repeatable(self) -> set[int]:
        """The ids that the repetition penalty is for."""
        last = self.params.repeat_last_n
        if last < 0:
            return set(self.tokens)
        return set(self.tokens[-last:]) if last else set()


def check(params: SamplingParams, vocab_size: int) -> None:
    """Refuses what has no meaning. Raises InvalidRequest naming the field."""
    p = params
    finite = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    wrong = {
        "temperature": p.temperature < 0,
        "top_k": p.top_k < 0,
        "top_p": not 0 <= p.top_p <= 1,
        "min_p": not 0 <= p.min_p <= 1,
        "repetition_penalty": p.repetition_penalty <= 0,
        "repeat_last_n": p.repeat_last_n < -1,
        "logit_bias": any(not 0 <= i < vocab_size or math.isnan(b) or b == math.inf for i, b in p.logit_bias.items()),
        "seed": not 0 <= p.seed < 2**64,
        "sampling parameters": not all(map(math.isfinite, finite)),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidRequest(f"{name} is out of range")


def sample(logits: Tensor, sequence: SamplingState, allowed: bytes | None = None) -> TokenOutput | None:
    """Draws the next token from finite logits [V]. None when `allowed` (a bitset over ids), biases and stop ids leave nothing.

    Does not append to the sequence: the caller does, once the whole step has succeeded.
    """
    scores = adjust(logits, sequence)
    if allowed is not None:
        scores = scores.masked_fill(~_unpack(allowed, len(scores)).to(scores.device), -math.inf)
    params = sequence.params
    token = int(scores.argmax())  # the first of equal maxima
    if scores[token] == -math.inf:
        return None
    if params.temperature > 0:
        ids, weights = survivors(scores, params)
        number = uniform(params.seed, sequence.choice, len(sequence.tokens))
        token = int(ids[pick(weights, number)])
    return with_logprobs(logits, token, sequence.logprobs)


def adjust(logits: Tensor, sequence: SamplingState) -> Tensor:
    """Bias, penalties and minimum length, in the order SamplingParams gives. A new float64 tensor [V]."""
    p, scores = sequence.params, logits.to(torch.float64, copy=True)
    if p.logit_bias:
        scores[_ids(p.logit_bias, scores)] += scores.new_tensor(list(p.logit_bias.values()))
    if p.repetition_penalty != 1.0 and (seen := sequence.repeatable()):
        ids = _ids(seen, scores)
        values = scores[ids]
        scores[ids] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and sequence.counts:
        counts = scores.new_tensor(list(sequence.counts.values()))
        scores[_ids(sequence.counts, scores)] -= p.presence_penalty + p.frequency_penalty * counts
    if sequence.output_tokens < sequence.min_tokens:
        scores[_ids(sequence.stop_ids, scores)] = -math.inf
    return scores


def survivors(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The ids that top-k, top-p and min-p leave, ascending, and their weights: exp((score - best) / temperature).

    top-p is taken over what top-k leaves (renormalised): the fewest best ids whose weights reach top_p of the sum, at least one.
    min-p keeps weights >= min_p, the best weight being 1.
    """
    if 0 < params.top_k < len(scores):
        ids = first(scores, params.top_k)
        scores = scores[ids]
    else:
        ids = torch.arange(len(scores), device=scores.device)
    weights = ((scores - scores.max()) / params.temperature).exp()
    if params.top_p < 1:
        kept = first(scores, _nucleus(weights, params.top_p))
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = weights >= params.min_p
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def first(scores: Tensor, count: int) -> Tensor:
    """Indices, ascending, of the first `count` in the order (score descending, index ascending). A partition, not a sort."""
    edge = scores.topk(count).values[-1]
    above = scores > edge
    ties = (scores == edge).nonzero().squeeze(-1)[: count - int(above.sum())]
    above[ties] = True
    return above.nonzero().squeeze(-1)


def pick(weights: Tensor, number: float) -> int:
    """The first index whose cumulative weight exceeds `number` (in [0, 1)) of the total: never one of weight 0."""
    cumulative = weights.cumsum(0)
    target = cumulative[-1] * number
    # number * total can round up to the total itself: then the last index that has weight
    target = torch.minimum(target, cumulative[-1].nextafter(cumulative.new_tensor(0.0)))
    return int(torch.searchsorted(cumulative, target, right=True))


def with_logprobs(logits: Tensor, token: int, count: int | None) -> TokenOutput:
    """The token, with the log-probabilities asked for, of the model's own distribution in float64."""
    if count is None:
        return TokenOutput(token)
    log_probabilities = logits.to(torch.float64).log_softmax(0)
    best: list[tuple[int, float]] = []
    if count:
        ids = first(logits, min(count, len(logits)))
        order = log_probabilities[ids].argsort(descending=True, stable=True)
        best = [(int(i), float(log_probabilities[i])) for i in ids[order]]
    return TokenOutput(token, float(log_probabilities[token]), best)


def _nucleus(weights: Tensor, top_p: float) -> int:
    """How many of the best weights it takes to reach `top_p` of their sum."""
    goal, looked = weights.sum() * top_p, min(_FIRST_LOOK, len(weights))
    while True:
        cumulative = weights.topk(looked).values.cumsum(0)
        reached = int(torch.searchsorted(cumulative, goal)) + 1  # the first index with cumulative >= goal
        if reached <= looked or looked == len(weights):
            return min(reached, looked)
        looked = min(8 * looked, len(weights))


def _ids(ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)


def _unpack(bits: bytes, count: int) -> Tensor:
    """bool [count]; id i is bit i % 8 of byte i // 8."""
    packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:count].to(torch.bool)
