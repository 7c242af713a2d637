"""Speculation as a client sees it: the same text, token for token, in fewer steps; on and off by field and by setting.

A real worker with TinyRand, biased to few letters so that it repeats itself. Each text is compared with what the same daemon says
without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.real_worker import real_daemon, send
from tests.daemon.scripted import MODEL, Scripted, ndjson, spelled, sse
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

TINY = tiny_rand(seed=7, context_tokens=4096)
PROMPT = spelled(*"the sky is the sky is the sky")
FEW = {str(token): 6 for token in spelled(*"abcdefgh")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = TINY.save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Scripted]:
    with real_daemon(folder, MODEL) as daemon:
        yield daemon


def complete(daemon: Scripted, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    body |= {"logit_bias": FEW} | fields
    return send(daemon, "/v1/completions", body).json


@pytest.fixture(scope="module")
def plain(daemon: Scripted) -> dict[str, Any]:
    return complete(daemon, speculation=False)


def drafts(daemon: Scripted) -> tuple[int, int]:
    (model,) = daemon.get("/api/ps").json["models"]
    return model["drafted_tokens"], model["accepted_tokens"]


def test_the_same_text_with_drafts(daemon: Scripted, plain: dict[str, Any]) -> None:
    before = drafts(daemon)
    found = complete(daemon)
    assert found["choices"] == plain["choices"], "text, log-probabilities and finish reason"
    assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 200
    drafted, accepted = found["timings"]["draft_n"], found["timings"]["draft_n_accepted"]
    assert drafted >= accepted > 20, "nothing was drafted: this test proves nothing"
    assert (plain["timings"]["draft_n"], plain["timings"]["draft_n_accepted"]) == (0, 0)
    assert drafts(daemon) == (before[0] + drafted, before[1] + accepted)
    (model,) = daemon.get("/api/ps").json["models"]
    assert model["drafter"] == "lookup"
    page = daemon.get("/metrics").body.decode()
    assert f"cavectl:drafted_tokens_total {drafts(daemon)[0]}" in page
    assert f"cavectl:accepted_tokens_total {drafts(daemon)[1]}" in page


def test_a_seed_gives_the_same_text_with_and_without(daemon: Scripted) -> None:
    for seed in range(3):
        fields = {"temperature": 0.8, "top_p": 0.9, "seed": seed, "frequency_penalty": 0.1}
        assert complete(daemon, **fields)["choices"] == complete(daemon, **fields, speculation=False)["choices"]


def test_every_token_is_an_event_of_its_own(daemon: Scripted) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body |= {"logit_bias": FEW}
    on, off = (
        sse(send(daemon, "/v1/completions", body | {"stream": True, "speculation": speculation}).body)[:-1]
        for speculation in (True, False)
    )
    assert [event["choices"] for event in on] == [event["choices"] for event in off]
    assert len(on) > 100


@pytest.mark.parametrize("at", [20, 61, 100])
def test_stop_strings_in_mid_run(daemon: Scripted, plain: dict[str, Any], at: int) -> None:
    stop = plain["choices"][0]["text"][at : at + 3]
    with_drafts, without = complete(daemon, stop=stop), complete(daemon, stop=stop, speculation=False)
    assert with_drafts["choices"] == without["choices"] and with_drafts["usage"] == without["usage"]
    assert with_drafts["choices"][0]["finish_reason"] == "stop"


def test_ollamas_dialect_has_the_field_too(daemon: Scripted) -> None:
    body = {"model": MODEL, "prompt": "the sky is the sky is", "options": {"temperature": 0, "num_predict": 80}}
    on, off = (ndjson(send(daemon, "/api/generate", body | {"speculation": on}).body) for on in (True, False))
    assert [line["response"] for line in on] == [line["response"] for line in off]
    assert off[-1]["timings"]["draft_n"] == 0
    refused = send(daemon, "/api/generate", body | {"speculation": "maybe"})
    assert refused.status == 400 and "speculation" in refused.body.decode()


def test_a_setting_turns_it_off(folder: Path, plain: dict[str, Any]) -> None:
    with real_daemon(folder, MODEL, speculation="off") as daemon:
        found = complete(daemon)
        assert found["choices"] == plain["choices"] and found["timings"]["draft_n"] == 0
        assert daemon.get("/api/ps").json["models"][0]["drafter"] == ""
