"""Prefixes shared over HTTP, with the real worker and a tiny model: hits on every route, salts, pins, choices, growth, cancelling.

What a hit may change is nothing but time: every text here is compared with the one that a cold cache gives, or with the oracle's.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.real_worker import real_daemon, send, text_of
from tests.daemon.scripted import MODEL, Scripted, post, spelled
from tests.daemon.wire import until
from tests.fixtures.tiny_rand import oracle_greedy, tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

TINY = tiny_rand(context_tokens=1024)
LOADED_TOKENS = 256  # less than the model could


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tok_in(TINY.save(tmp_path_factory.mktemp("tiny")))


def write_tiny_tok_in(folder: Path) -> Path:
    write_tiny_tok(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Scripted]:
    with real_daemon(folder, MODEL, context_tokens=str(LOADED_TOKENS)) as daemon:
        yield daemon
        assert ps(daemon)["accounting_errors"] == 0 and ps(daemon)["pages"]["used"] == 0


@pytest.fixture(scope="module")
def fresh() -> Iterator[str]:
    """Texts of 70 letters, no two with the same first one, so that no test finds what another one cached."""
    draw = random.Random(1)
    return (first + "".join(draw.choices(string.ascii_lowercase, k=69)) for first in string.ascii_letters + string.digits)


def ps(daemon: Scripted) -> dict[str, Any]:
    [model] = daemon.get("/api/ps").json["models"]
    return model


def cached(end: dict[str, Any]) -> int:
    return end["usage"]["prompt_tokens_details"]["cached_tokens"]


def complete(daemon: Scripted, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    reply = send(daemon, "/v1/completions", body)
    assert reply.status == 200, reply.body
    return reply.json


def text(end: dict[str, Any], choice: int = 0) -> str:
    return end["choices"][choice]["text"]


def bodies(content: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": content}]
    options = {"options": {"num_predict": 4, "temperature": 0}, "stream": False}
    return {
        "/v1/chat/completions": {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0},
        "/v1/completions": {"model": MODEL, "prompt": content, "max_tokens": 4, "temperature": 0},
        "/api/chat": {"model": MODEL, "messages": messages, **options},
        "/api/generate": {"model": MODEL, "prompt": content, **options},
    }


@pytest.mark.parametrize("path", bodies(""))
def test_a_hit_to_the_token_is_reported_on_every_route(tiny: Scripted, fresh: Iterator[str], path: str) -> None:
    body = bodies(next(fresh))[path]
    cold, warm = (send(tiny, path, body).json for _ in range(2))
    prompt = warm["usage"]["prompt_tokens"]
    assert cached(cold) < 16 and cached(warm) == prompt - 1, "all but the one that has to be computed"
    assert warm["timings"]["cache_n"] == prompt - 1 and warm["timings"]["prompt_n"] == 1
    if path.startswith("/api"):
        assert warm["prompt_eval_count"] == prompt
    assert {name: cold.get(name) for name in ("choices", "message", "response")} == {
        name: warm.get(name) for name in ("choices", "message", "response")
    }


def test_routes_and_dialects_share(tiny: Scripted, fresh: Iterator[str]) -> None:
    both = bodies(next(fresh))
    first = send(tiny, "/v1/chat/completions", both["/v1/chat/completions"]).json
    assert cached(first) < 16
    assert cached(send(tiny, "/api/chat", both["/api/chat"]).json) == first["usage"]["prompt_tokens"] - 1


def test_the_next_turn_of_a_chat_finds_the_one_before_with_its_answer(tiny: Scripted, fresh: Iterator[str]) -> None:
    prompt = spelled(*next(fresh))
    answer = complete(tiny, prompt, max_tokens=20, logprobs=0)
    ids = oracle_greedy(TINY, prompt, 20)
    assert text(answer) == text_of(ids)
    turn = prompt + ids + spelled(*" and then?")
    again = complete(tiny, turn)
    assert cached(again) == len(prompt) + 20 - 1, "the last token drawn was never fed back"
    assert text(again) == text_of(oracle_greedy(TINY, turn, 8))


def test_b44_only_the_same_salt_hits_and_sampling_does_not_split(tiny: Scripted, fresh: Iterator[str]) -> None:
    prompt = spelled(*next(fresh))
    base = complete(tiny, prompt)
    seeded = {"temperature": 1.0, "seed": 5, "top_k": 40}
    cold = {salt: complete(tiny, prompt, cache_salt=salt) for salt in ("a", "b")}
    assert [cached(base), *map(cached, cold.values())] == [0, 0, 0], "no timing tells of another's prompt"
    for salt in ({}, {"cache_salt": ""}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        warm = complete(tiny, prompt, **salt)
        assert cached(warm) == len(prompt) - 1 and text(warm) == text(base)
    other = complete(tiny, prompt, **seeded)
    assert cached(other) == len(prompt) - 1
    isolated = complete(tiny, prompt, **seeded, cache_salt="never seen")
    assert cached(isolated) == 0 and text(isolated) == text(other), "cold and warm draw alike"
    penalties = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "repeat_last_n": -1}
    warm, cold_too = complete(tiny, prompt, **penalties), complete(tiny, prompt, **penalties, cache_salt="nor this")
    assert cached(warm) == len(prompt) - 1 and cached(cold_too) == 0 and text(warm) == text(cold_too)


def test_a_pinned_prompt_outlives_what_evicts_others(folder: Path, fresh: Iterator[str]) -> None:
    """A pool of 24 pages. Two prompts of 4 whole pages, one of them pinned; then others that need all the rest."""
    page_bytes = 16 * 2 * TINY.config["num_hidden_layers"] * TINY.config["num_key_value_heads"] * 16 * 4
    memory = {"kv_dtype": "float32", "kv_memory_bytes": str(24 * page_bytes)}
    with real_daemon(folder, MODEL, context_tokens="256", **memory) as daemon:
        pinned, plain = (spelled(*next(fresh))[:65] for _ in range(2))
        complete(daemon, pinned, pin_prompt=True)
        complete(daemon, plain)
        assert ps(daemon)["pages"] | {"cached": 0} == {"total": 24, "used": 0, "cached": 0, "pinned": 4}
        for _ in range(4):
            complete(daemon, (spelled(*next(fresh)) * 4)[:230])
        assert ps(daemon)["evicted_pages"] > 0
        assert cached(complete(daemon, plain)) == 0 and cached(complete(daemon, pinned)) == 64
        complete(daemon, pinned, pin_prompt=False)
        assert ps(daemon)["pages"]["pinned"] == 0
        for _ in range(4):
            complete(daemon, (spelled(*next(fresh)) * 4)[:230])
        assert cached(complete(daemon, pinned)) == 0


def test_choices_share_the_pages_of_their_prompt(tiny: Scripted, fresh: Iterator[str]) -> None:
    prompt = (spelled(*next(fresh)) * 3)[:128]
    before = ps(tiny)
    end = complete(tiny, prompt, n=3, temperature=1.0, seed=3, max_tokens=4)
    after = ps(tiny)
    assert cached(end) == 0 and end["usage"]["prompt_tokens"] == 128, "the first choice computed all of it"
    assert after["hit_tokens"] - before["hit_tokens"] == 2 * 127, "and the others nothing but the last token"
    kept = after["pages"]["cached"] - before["pages"]["cached"] + after["evicted_pages"] - before["evicted_pages"]
    assert 8 <= kept <= 8 + 3, "the prompt's 8 pages once, and what differs"
    alone = [complete(tiny, prompt, temperature=1.0, seed=3, n=n, max_tokens=4) for n in (1, 2)]
    assert text(alone[0]) == text(end) and text(alone[1], 1) == text(end, 1)


def test_a_larger_context_grows_the_loaded_model(folder: Path, fresh: Iterator[str]) -> None:
    with real_daemon(folder, MODEL, context_tokens="128") as daemon:
        prompt = (spelled(*next(fresh)) * 4)[:200]
        short = prompt[:100]
        assert text(complete(daemon, short)) == text_of(oracle_greedy(TINY, short, 8))
        before = ps(daemon)
        refused = send(daemon, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4})
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        assert "200" in refused.json["error"]["message"] and "128" in refused.json["error"]["message"]
        larger = complete(daemon, prompt, ctx=512)
        after = ps(daemon)
        assert text(larger) == text_of(oracle_greedy(TINY, prompt, 8))
        assert (after["pid"], after["context_length"], before["context_length"]) == (before["pid"], 512, 128)
        assert cached(larger) == 100, "and what was cached stays"
        assert after["pages"]["total"] >= 32 and after["size"] >= before["size"]
        assert text(complete(daemon, prompt)) == text(larger), "from now on it is there for everybody"
        beyond = send(daemon, "/v1/completions", {"model": MODEL, "prompt": short, "ctx": 2048})
        assert (beyond.status, beyond.code) == (400, "invalid_request")
        assert "2048" in beyond.json["error"]["message"] and "1024" in beyond.json["error"]["message"]
        assert ps(daemon)["pid"] == before["pid"]


def test_it_grows_while_a_stream_runs(folder: Path, fresh: Iterator[str]) -> None:
    with real_daemon(folder, MODEL, context_tokens="256") as daemon, daemon.client() as client:
        client.sock.settimeout(60)
        prompt = spelled(*next(fresh))[:20]
        fields = {"model": MODEL, "temperature": 0, "ignore_eos": True}
        client.send(post("/v1/completions", fields | {"prompt": prompt, "max_tokens": 200, "stream": True}))
        client.head()
        client.chunk()
        pid = ps(daemon)["pid"]
        assert text(complete(daemon, prompt, ctx=1024)) == text_of(oracle_greedy(TINY, prompt, 8))
        stream = b"".join(iter(client.chunk, b""))
        assert b'"finish_reason":"length"' in stream and b"error" not in stream
        assert ps(daemon)["pid"] == pid and ps(daemon)["context_length"] == 1024


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_b20_a_request_that_leaves_gives_its_pages_back(tiny: Scripted, fresh: Iterator[str], kind: str) -> None:
    body = {"model": MODEL, "prompt": spelled(*next(fresh)), "ignore_eos": True, "stream": True, "n": 4}
    with tiny.client(kind) as client:
        client.sock.settimeout(60)
        client.send(post("/v1/completions", body))
        client.head()
        client.chunk()
    until(lambda: ((model := ps(tiny))["requests"] == 0 and model["pages"]["used"] == 0) or None)
    assert ps(tiny)["queue"] == {"running": 0, "waiting": 0}


def test_without_the_prefix_cache_nothing_is_found(folder: Path, fresh: Iterator[str]) -> None:
    with real_daemon(folder, MODEL, prefix_cache="off") as daemon:
        prompt = spelled(*next(fresh))
        first, second = complete(daemon, prompt), complete(daemon, prompt)
        assert cached(first) == cached(second) == 0 and text(first) == text(second)
        assert ps(daemon)["pages"]["cached"] == ps(daemon)["hit_tokens"] == 0


def test_a_model_loaded_again_begins_cold_and_says_the_same(tiny: Scripted, fresh: Iterator[str]) -> None:
    prompt = spelled(*next(fresh))
    first = complete(tiny, prompt)
    tiny.unload()
    second = complete(tiny, prompt)
    assert cached(second) == 0 and text(first) == text(second)
