"""The same request gives the same text, whatever way it comes and whatever else goes on: a real worker in float64, over HTTP.

Streamed = not; Unix socket = TCP; OpenAI = Ollama; safetensors = F32 GGUF; cold = warm; alone = in company; before = after a
reload. Greedy and sampled with a seed. Inside the engine (chunks, batches, preemption): tests/engine/test_metamorphic.py.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon.real_worker import real_daemon
from tests.daemon.scripted import MODEL, Scripted, ndjson, post, sse
from tests.fixtures.gguf_writer import ARRAY, I32, STRING, U32, Array, Key, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import CHATML, EOS, IM_END, tiny_vocabulary, write_tiny_tok

TINY = tiny_rand(seed=11, context_tokens=512)
GGUF = "tiny/gguf:latest"
COUNT = 24

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"text": "the sky is the sky, hello hello", "temperature": 0.0},
    "greedy, long": {"text": "hello user " * 22, "temperature": 0.0},
    "sampled": {"text": "the sky", "temperature": 1.2, "seed": 5, "top_p": 0.95},
    "penalised": {"text": "hello he hello", "temperature": 0.9, "seed": 1 << 40, "repeat_penalty": 1.3, "presence_penalty": 0.5},
    "filtered": {"text": "is the sky blue?", "temperature": 1.5, "seed": 77, "top_k": 20, "min_p": 0.01},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = TINY.save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    file.write_bytes(_gguf())
    command = shlex.join([sys.executable, "-m", "tests.fixtures.float64_worker"])
    with real_daemon(folder, MODEL, worker_command=command) as daemon:
        assert ndjson(daemon.post("/api/import", {"path": str(file), "name": GGUF}).body)[-1]["status"] == "success"
        yield daemon


def _gguf() -> bytes:
    words = tiny_vocabulary()
    keys = [
        Key("tokenizer.ggml.model", STRING, words.model),
        Key("tokenizer.ggml.pre", STRING, words.pre),
        Key("tokenizer.ggml.tokens", ARRAY, Array(STRING, words.tokens)),
        Key("tokenizer.ggml.token_type", ARRAY, Array(I32, words.token_types)),
        Key("tokenizer.ggml.merges", ARRAY, Array(STRING, words.merges)),
        Key("tokenizer.ggml.bos_token_id", U32, words.bos_id),
        Key("tokenizer.ggml.eos_token_id", U32, EOS),
        Key("tokenizer.ggml.eot_token_id", U32, IM_END),
        Key("tokenizer.chat_template", STRING, CHATML),
    ]
    return gguf_bytes(llama_gguf(TINY.config, TINY.tensors, keys))


# --- the ways --------------------------------------------------------------------------------------------------------------------


def _ask(daemon: Scripted, path: str, body: dict[str, Any], kind: str = "unix") -> bytes:
    with daemon.client(kind) as client:
        client.sock.settimeout(100)
        client.send(post(path, body))
        reply = client.reply()
    assert reply.status == 200, reply.body
    return reply.body


def openai(
    daemon: Scripted, name: str, *, chat: bool, stream: bool = False, kind: str = "unix", model: str = MODEL, **extra: Any
) -> str:
    fields = dict(REQUESTS[name])
    text = fields.pop("text")
    body = {"model": model, "max_tokens": COUNT, "stream": stream, **fields, **extra}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    raw = _ask(daemon, "/v1/chat/completions" if chat else "/v1/completions", body, kind)
    if not stream:
        choice = json.loads(raw)["choices"][0]
        return choice["message"]["content"] if chat else choice["text"]
    choices = [event["choices"][0] for event in sse(raw)[:-1] if event["choices"]]
    return "".join(choice["delta"].get("content") or "" if chat else choice["text"] for choice in choices)


def ollama(daemon: Scripted, name: str, *, chat: bool, stream: bool = False, kind: str = "unix", model: str = MODEL) -> str:
    fields = dict(REQUESTS[name])
    text = fields.pop("text")
    # Ollama's own defaults differ from OpenAI's: say all
    options = {"num_predict": COUNT, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, **fields}
    body: dict[str, Any] = {"model": model, "stream": stream, "options": options}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text, "raw": True}
    lines = ndjson(_ask(daemon, "/api/chat" if chat else "/api/generate", body, kind) + (b"" if stream else b"\n"))
    return "".join(line["message"]["content"] if chat else line["response"] for line in lines)


@pytest.fixture(scope="module")
def plain(daemon: Scripted) -> dict[tuple[str, bool], str]:
    """Each request for the first time, alone: by name, and whether it is a chat."""
    texts = {(name, chat): openai(daemon, name, chat=chat) for name in REQUESTS for chat in (False, True)}
    assert len(set(texts.values())) == len(texts), "the requests do not tell apart"
    return texts


both = pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
each = pytest.mark.parametrize("name", REQUESTS)


@both
@each
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_in_every_dialect_on_every_socket_streamed_and_not(
    daemon: Scripted, plain: dict[tuple[str, bool], str], name: str, chat: bool, kind: str, stream: bool
) -> None:
    assert openai(daemon, name, chat=chat, stream=stream, kind=kind) == plain[name, chat]
    assert ollama(daemon, name, chat=chat, stream=stream, kind=kind) == plain[name, chat]


@both
@each
def test_from_a_cold_prefix(daemon: Scripted, plain: dict[tuple[str, bool], str], name: str, chat: bool) -> None:
    assert openai(daemon, name, chat=chat, cache_salt=f"cold {name} {chat}") == plain[name, chat]


@both
@each
def test_from_a_gguf_of_the_same_weights(daemon: Scripted, plain: dict[tuple[str, bool], str], name: str, chat: bool) -> None:
    assert openai(daemon, name, chat=chat, model=GGUF) == plain[name, chat]
    assert ollama(daemon, name, chat=chat, model=GGUF, stream=True) == plain[name, chat]


def test_all_at_once_from_several_clients(daemon: Scripted, plain: dict[tuple[str, bool], str]) -> None:
    found: dict[tuple[str, bool, int], str] = {}

    def ask(name: str, chat: bool, number: int) -> None:
        salt = f"company {number % 2}"
        found[name, chat, number] = openai(daemon, name, chat=chat, stream=True, kind=["unix", "tcp"][number % 2], cache_salt=salt)

    threads = [threading.Thread(target=ask, args=(*key, number)) for key in plain for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(*key, number): text for key, text in plain.items() for number in range(3)}


def test_after_unload_and_reload(daemon: Scripted, plain: dict[tuple[str, bool], str]) -> None:
    before = {model["pid"] for model in daemon.get("/api/ps").json["models"]}
    daemon.unload()
    assert {key: openai(daemon, key[0], chat=key[1], stream=True) for key in plain} == plain
    assert before.isdisjoint({model["pid"] for model in daemon.get("/api/ps").json["models"]})
