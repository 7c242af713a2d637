"""Brings one file over HTTP into a partial: goes on where it stopped, believes nothing that does not add up.

A 206 must begin where we are and have the total we know; a 200 to a Range request, or another ETag, begins the file again.
Failures that may pass are tried again a few times with growing, jittered waits, and Retry-After is honoured up to a bound. The
hash is the caller's check.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from daemon.store.partials import Partial, hash_mismatch
from daemon.store.sources import Report, in_thread
from daemon.store.transport import MANY, FetchError, Transport

if TYPE_CHECKING:
    import httpx

_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Retries:
    """`limit` failures in a row end it; one that brought bytes along starts the count again."""

    limit: int = 4
    base_s: float = 0.5
    cap_s: float = 10.0
    longest_wait_s: float = 60.0

    def delay_s(self, failures: int, wait_s: float | None) -> float:
        if wait_s is not None:
            return wait_s + random.uniform(0, self.base_s)  # noqa: S311 - spreads clients, hides nothing
        ceiling = min(self.cap_s, self.base_s * 2 ** (failures - 1))
        return random.uniform(ceiling / 2, ceiling)  # noqa: S311

    async def pause(self, failures: int, error: FetchError) -> None:
        """Waits before the next try, or raises `error` when there is none."""
        too_long = error.wait_s is not None and error.wait_s > self.longest_wait_s
        if failures > min(self.limit, error.retries) or too_long:
            raise error
        await asyncio.sleep(self.delay_s(failures, error.wait_s))

    async def run(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        failures = 0
        while True:
            try:
                return await attempt()
            except FetchError as error:
                failures += 1
                await self.pause(failures, error)


@dataclass(frozen=True, slots=True)
class FileFetcher:
    transport: Transport
    retries: Retries
    chunk_bytes: int = 256 << 10

    async def fetch(self, url: str, partial: Partial, report: Report) -> None:
        """Fills `partial` to its size. FetchError, or hash_mismatch for an answer that cannot be this file."""
        failures, best = 0, partial.size
        while not partial.complete:
            try:
                await self._attempt(url, partial, report)
            except FetchError as error:
                failures = 1 if partial.size > best else failures + 1
                best = max(best, partial.size)
                await self.retries.pause(failures, error)

    async def _attempt(self, url: str, partial: Partial, report: Report) -> None:
        headers = {}
        if partial.size:
            headers["Range"] = f"bytes={partial.size}-"
            if partial.meta.etag:
                headers["If-Range"] = partial.meta.etag
        async with self.transport.stream(url, headers) as response:
            self._check_start(response, partial)
            async for chunk in response.aiter_raw(self.chunk_bytes):
                await in_thread(partial.write, chunk)
                report(partial.size)
        if not partial.complete:
            raise FetchError(f"the answer for {partial.wanted.name} ended early", "network_error", retries=MANY)

    def _check_start(self, response: httpx.Response, partial: Partial) -> None:
        """Makes `partial` ready for this body, or raises when the body is of no use."""
        etag, name = _strong_etag(response), partial.wanted.name
        if response.status_code == 416:
            partial.restart()
            raise FetchError(f"the hub has less of {name} than is here", "network_error", retries=MANY)
        if response.headers.get("content-type", "").startswith("text/html") and not name.endswith(".html"):
            raise hash_mismatch(name, "a web page came instead")
        if response.status_code == 206:
            if partial.meta.etag and etag and etag != partial.meta.etag:
                partial.restart()
                raise FetchError(f"{name} changed while it was fetched", "network_error", retries=MANY)
            self._check_range(response, partial)
        elif partial.size:
            partial.restart()
        self._check_length(response, partial)
        if etag:
            partial.note(etag)

    def _check_range(self, response: httpx.Response, partial: Partial) -> None:
        given = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if given is None or int(given[1]) != partial.size or int(given[3]) != partial.wanted.size:
            partial.restart()
            raise FetchError(f"another part of {partial.wanted.name} came than was asked for", "network_error", retries=MANY)

    def _check_length(self, response: httpx.Response, partial: Partial) -> None:
        length, left = response.headers.get("content-length", ""), partial.wanted.size - partial.size
        if length.isascii() and length.isdigit() and int(length) != left:
            raise hash_mismatch(partial.wanted.name, f"{length} bytes were offered where {left} are missing")


def _strong_etag(response: httpx.Response) -> str:
    etag = response.headers.get("etag", "")
    return etag if etag.startswith('"') and len(etag) <= 256 else ""
