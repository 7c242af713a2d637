"""Which requests the engine takes: those that it can finish, alone in the cache if need be. The others are told why, with numbers.

Not here: how many may wait (daemon/admission.py). Invariant: a request that was taken fits beside everything that is pinned.
"""

from __future__ import annotations

from engine.cache.blocks import pages_for
from engine.cache.manager import CacheManager
from engine.errors import ContextLengthExceeded, InvalidRequest, OutOfMemory
from engine.types import EngineRequest

TOKEN_IDS = 1 << 31  # ids are 32-bit numbers in the cache's keys


def admit(request: EngineRequest, cache: CacheManager, context_tokens: int, promised_pages: int) -> int:
    """Output tokens that `request` may have at most. `promised_pages`: those that requests under way will have pinned.

    Raises InvalidRequest, ContextLengthExceeded, or OutOfMemory for one that not even the empty cache could hold, or not pinned.
    """
    _check_values(request)
    prompt = len(request.prompt)
    if prompt >= context_tokens:
        raise ContextLengthExceeded(prompt_tokens=prompt, context_tokens=context_tokens)
    limit = min(request.max_tokens, context_tokens - prompt)
    if shortage := cache.shortage(prompt + limit - 1):  # the last token drawn is never fed back
        raise OutOfMemory(
            f"{prompt} prompt tokens and {limit} to come need {shortage[0]} cache pages and there are {shortage[1]}",
            hint="shorten the prompt, ask for fewer tokens, or give the cache more memory with --kv-memory",
        )
    if request.pin and not cache.can_pin(prompt, context_tokens, promised_pages):
        raise OutOfMemory(
            f"pinning {pages_for(prompt)} more cache pages would leave less than one context of {context_tokens} tokens",
            hint="unpin another prompt, or give the cache more memory with --kv-memory",
        )
    return limit


def _check_values(request: EngineRequest) -> None:
    if not request.prompt:
        raise InvalidRequest("the prompt has no tokens")
    if min(request.prompt) < 0 or max(request.prompt) >= TOKEN_IDS:
        raise InvalidRequest("token ids are not negative and less than 2^31")
    if request.max_tokens < 1 or request.n < 1:
        raise InvalidRequest("max_tokens and n must be at least 1")
