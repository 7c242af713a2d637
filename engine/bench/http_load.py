"""Requests as clients of a server make them, and what they see: when the first token came, how many came by when.

Speaks /v1/completions with streaming, which our daemon and llama-server both do, over one plain connection per request. Prompts are
token ids, so that both sides get the same, and end-of-text is ignored, so that every answer has the tokens that were asked for.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from engine.bench import timing
from engine.bench.timing import percentile

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Address:
    port: int
    model: str
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request; `tokens` as the server counted them."""

    first_s: float
    end_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """Several clients at once."""

    tokens_per_s: float  # of all, from the first request to the last token
    first_p50_s: float


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def ask(address: Address, prompt: Sequence[int], tokens: int) -> Answer:
    """One request, read to its end. Raises RuntimeError for an answer that is none, OSError for a connection that fails."""
    body = {
        "model": address.model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    try:
        start = timing.seconds()
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {response.read(300).decode('utf-8', 'replace')}")
            return _read(response, start)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, start: float) -> Answer:
    """A text that is empty until a character is whole counts as a token too: it came."""
    first: float | None = None
    tokens = 0
    for event in _events(response):
        if first is None and event.choices:
            first = timing.seconds()
        if event.usage:
            tokens = event.usage.completion_tokens
    if first is None:
        raise RuntimeError("the server's answer had no token")
    return Answer(first - start, timing.seconds() - start, tokens)


def _events(response: http.client.HTTPResponse) -> Iterator[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    while line := response.readline():
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield decoder.decode(data)


def crowd(address: Address, prompts: Sequence[Sequence[int]], tokens: int) -> Crowd:
    """All prompts at once, a connection each. Raises what a client raised."""
    answers: list[Answer | Exception] = []

    def client(prompt: Sequence[int]) -> None:
        try:
            answers.append(ask(address, prompt, tokens))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=client, args=(prompt,)) for prompt in prompts]
    start = timing.seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = timing.seconds() - start
    done = [answer for answer in answers if isinstance(answer, Answer)]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    short = next((answer.tokens for answer in done if answer.tokens != tokens), None)
    if short is not None:
        raise RuntimeError(f"an answer had {short} tokens, {tokens} were asked for")
    return Crowd(sum(answer.tokens for answer in done) / seconds, percentile([answer.first_s for answer in done], 0.5))
