"""What both dialects report alike: usage, timings, log-probabilities; and several generations read as one stream.

Invariant: usage counts tokens of the engine, never events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from daemon.request import GenerationEvent, Summary, TokenText


def usage_of(summaries: Sequence[Summary]) -> dict[str, Any]:
    prompt = sum(summary.prompt_tokens for summary in summaries)
    output = sum(summary.output_tokens for summary in summaries)
    cached = sum(summary.cached_tokens for summary in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """llama-server's names, and `ttft_ms`, `queue_ms`. The first token belongs to the prompt's time, so rates leave it out."""
    prompt_n = sum(s.prompt_tokens - s.cached_tokens for s in summaries)
    prompt_ms = sum(s.prompt_ms for s in summaries)
    predicted_n = sum(s.output_tokens for s in summaries)
    predicted_ms = sum(s.predicted_ms for s in summaries)
    decoded = max(0, predicted_n - len(summaries))
    return {
        "cache_n": sum(s.cached_tokens for s in summaries),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / decoded if decoded else 0.0,
        "predicted_per_second": 1e3 * decoded / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(s.drafted_tokens for s in summaries),
        "draft_n_accepted": sum(s.accepted_tokens for s in summaries),
        "ttft_ms": max((s.ttft_ms for s in summaries), default=0.0),
        "queue_ms": max((s.queue_ms for s in summaries), default=0.0),
    }


def token_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def chat_logprob(token: TokenText) -> dict[str, Any]:
    top = [{"token": token_text(data), "logprob": logprob, "bytes": list(data)} for data, logprob in token.top]
    return {"token": token_text(token.data), "logprob": token.logprob, "bytes": list(token.data), "top_logprobs": top}


async def merged(
    sources: Sequence[AsyncGenerator[GenerationEvent, None]],
) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
    """Events of all sources as they come, each with its source's number. One that fails ends all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GenerationEvent] | None] = asyncio.Queue()

    async def pump(number: int, source: AsyncGenerator[GenerationEvent, None]) -> None:
        try:
            async with contextlib.aclosing(source) as events:
                async for event in events:
                    queue.put_nowait((number, event))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not None:
                yield item
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
