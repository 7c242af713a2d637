"""A minute of everything at once against a real worker with a small cache: what is true of one request is true of all of them.

Random prompts that begin alike, priorities, salts, pins, choices, contexts, and clients that leave in mid-answer. Afterwards every
account balances, nothing is held, and greedy answers are still those that a cold cache gave.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.daemon.real_worker import real_daemon
from tests.daemon.scripted import MODEL, Scripted, post
from tests.daemon.wire import until
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

CLIENTS = 6
TOPICS = ["the sky is blue, the sky is the sky ", "hello user hello he ", "user the user is "]
GREEDY = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """200 pages of 8 KiB hold a few contexts of 512 tokens: there is eviction and preemption all the time."""
    folder = tiny_rand(seed=3, context_tokens=2048).save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    with real_daemon(folder, MODEL, context_tokens="512", kv_memory_bytes=str(200 * 8192), max_queue="64") as daemon:
        yield daemon


def _model(daemon: Scripted) -> dict[str, Any]:
    [model] = daemon.get("/api/ps").json["models"]
    return model


def _body(chance: random.Random) -> dict[str, Any]:
    text = chance.choice(TOPICS) * chance.randint(1, 14) + str(chance.randint(0, 5)) * chance.randint(0, 9)
    body = {
        "model": MODEL,
        "prompt": text,
        "max_tokens": chance.randint(1, 60),
        "stream": chance.random() < 0.7,
        "priority": chance.choice(["high", "normal", "normal", "low"]),
        "n": chance.choice([1, 1, 1, 3]),
        "temperature": chance.choice([0, 1.0]),
        "ignore_eos": True,
    }
    if chance.random() < 0.2:
        body["cache_salt"] = chance.choice("ab")
    if chance.random() < 0.05:
        body["pin_prompt"] = chance.random() < 0.4
    return body


def _live(daemon: Scripted, seed: int, until_: float, seen: Counter[str], trouble: list[str]) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until_:
        try:
            with daemon.client(chance.choice(["unix", "tcp"])) as client:
                client.sock.settimeout(100)
                client.send(post("/v1/completions", _body(chance)))
                if chance.random() < 0.25:
                    time.sleep(chance.uniform(0, 0.3))
                    seen["left"] += 1
                    continue
                reply = client.reply()
            seen[str(reply.status)] += 1
            if reply.status not in (200, 429, 503) or (b'"error"' in reply.body and reply.status == 200):
                trouble.append(f"{reply.status} {reply.body[:300]!r}")
        except OSError as error:
            trouble.append(repr(error))


def _soak(daemon: Scripted, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    trouble: list[str] = []
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=_live, args=(daemon, seed, end, seen, trouble)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not trouble, trouble[:3]
    return seen


@pytest.mark.parametrize("seconds", [4, pytest.param(90, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
def test_after_a_storm_everything_is_as_before(daemon: Scripted, seconds: float) -> None:
    probes = [{**GREEDY, "prompt": topic * 3, "cache_salt": f"probe {seconds}"} for topic in TOPICS]
    before = [daemon.post("/v1/completions", probe).json["choices"][0]["text"] for probe in probes]
    _soak(daemon, 2)  # what a worker needs once, it has now
    worker = psutil.Process(_model(daemon)["pid"])
    resident, files = worker.memory_info().rss, worker.num_fds()
    seen = _soak(daemon, seconds)
    until(lambda: _model(daemon)["requests"] == 0 or None)
    model = _model(daemon)
    assert model["pid"] == worker.pid, "the worker did not survive"
    assert seen["200"] >= CLIENTS and seen["left"] > 0, seen
    until(lambda: _model(daemon)["pages"]["used"] == 0 or None)
    pages = _model(daemon)["pages"]
    assert pages["cached"] + pages["pinned"] <= pages["total"] and model["accounting_errors"] == 0
    assert model["hit_tokens"] > 0
    assert worker.memory_info().rss - resident < 64 << 20 and worker.num_fds() <= files + 2
    after = [daemon.post("/v1/completions", probe).json["choices"][0]["text"] for probe in probes]
    assert after == before
