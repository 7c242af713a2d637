"""Clients that other people wrote, against the real daemon: the openai and ollama packages, and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import ollama
import openai
import pytest

from tests.daemon.scripted import MODEL, Scripted, spelled

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "hello, é🙂"


@pytest.fixture
def script(daemon: Scripted) -> Scripted:
    daemon.script(spelled(TEXT.encode()))
    return daemon


@pytest.fixture(params=["tcp", "unix"])
def openai_client(script: Scripted, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    shown = script.daemon.shown
    if request.param == "tcp":
        with openai.OpenAI(base_url=f"http://127.0.0.1:{shown['port']}/v1", api_key="none", max_retries=0) as client:
            yield client
        return
    http = httpx.Client(transport=httpx.HTTPTransport(uds=shown["socket"]))
    with openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
def ollama_client(script: Scripted) -> Iterator[ollama.Client]:
    client = ollama.Client(host=f"http://127.0.0.1:{script.daemon.shown['port']}")
    yield client
    client._client.close()


def test_openai_chat(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=50, seed=3, logprobs=True)
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(TEXT.encode())
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    chunks = list(
        openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason == "stop"


def test_openai_completions_and_models(openai_client: openai.OpenAI) -> None:
    assert openai_client.completions.create(model=MODEL, prompt=["a", "b"]).choices[1].text == TEXT
    stream = openai_client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == TEXT
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    assert openai_client.models.retrieve(MODEL).id == MODEL


def test_openai_errors(openai_client: openai.OpenAI, script: Scripted) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="no/such", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        openai_client.completions.create(model=MODEL, prompt="x" * 100)
    assert long.value.code == "context_length_exceeded"
    script.script(spelled("x"), repeat=True, raise_at=3, every_ms=5)
    with pytest.raises(openai.APIError, match="failed in a step"):
        list(openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_ollama_chat_and_generate(ollama_client: ollama.Client) -> None:
    answer = ollama_client.chat(MODEL, messages=MESSAGES)
    assert answer.message.content == TEXT and answer.done_reason == "stop" and answer.eval_count == len(TEXT.encode())
    parts = list(ollama_client.chat(MODEL, messages=MESSAGES, stream=True, options={"temperature": 0, "num_ctx": 64}))
    assert "".join(part.message.content or "" for part in parts) == TEXT and parts[-1].done and parts[-1].total_duration
    assert ollama_client.generate(MODEL, prompt="a", keep_alive="5m").response == TEXT
    assert "".join(part.response for part in ollama_client.generate(MODEL, prompt="a", stream=True)) == TEXT
    logged = ollama_client.chat(MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert logged.logprobs and logged.logprobs[0].token == "h"


def test_ollama_models(ollama_client: ollama.Client) -> None:
    assert [model.model for model in ollama_client.list().models] == [MODEL]
    shown = ollama_client.show(MODEL)
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 64 and shown.capabilities == ["completion"]
    ollama_client.generate(MODEL, prompt="")
    [running] = ollama_client.ps().models
    assert running.model == MODEL and running.context_length == 64 and running.expires_at is not None
    ollama_client.generate(MODEL, prompt="", keep_alive=0)
    assert ollama_client.ps().models == []


def test_ollama_errors(ollama_client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no model no/such") as missing:
        ollama_client.chat("no/such", messages=MESSAGES)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as pull:
        list(ollama_client.pull("no/such", stream=True))
    assert "no/such" in str(pull.value)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(script: Scripted) -> None:
    socket, body = script.daemon.shown["socket"], json.dumps({"model": MODEL, "prompt": "a"})
    command = ["curl", "-sN", "--max-time", "20", "--unix-socket", socket, "http://localhost/api/generate", "-d", body]
    lines = [json.loads(line) for line in subprocess.check_output(command).splitlines()]
    assert "".join(line["response"] for line in lines) == TEXT and lines[-1]["done"]
    head = subprocess.check_output(["curl", "-sI", "--max-time", "20", "--unix-socket", socket, "http://localhost/"])
    assert head.startswith(b"HTTP/1.1 200")
