"""Nothing scripted: HTTP, text, engine worker and weights together. A tiny random model against its oracle, and the real model."""

from __future__ import annotations

import os
import signal
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.daemon.process import running
from tests.daemon.real_worker import real_daemon, send, text_of
from tests.daemon.scripted import MODEL, Scripted, ndjson, post, spelled, sse
from tests.daemon.wire import until
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import oracle_greedy, oracle_logits, tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

REAL = "smollm2/test:latest"
TINY = tiny_rand(context_tokens=256)

# --- the tiny model -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = TINY.save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    with real_daemon(folder, MODEL, kv_dtype="float32") as daemon:  # the oracle rounds nothing
        yield daemon


def greedy(daemon: Scripted, prompt: list[int], count: int) -> str:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": count, "ignore_eos": True}
    return send(daemon, "/v1/completions", body).json["choices"][0]["text"]


@pytest.mark.parametrize("prompt", ["the sky", "is it", "x" * 40])
def test_greedy_text_is_the_oracles(tiny: Scripted, prompt: str) -> None:
    ids = spelled(*prompt)
    assert greedy(tiny, ids, 24) == text_of(oracle_greedy(TINY, ids, 24))


def test_b09_greedy_does_not_depend_on_company(tiny: Scripted) -> None:
    prompts = [spelled(*("the world is " * (1 + i % 3))[: 5 + 7 * i % 31]) for i in range(6)]
    alone = [greedy(tiny, prompt, 12) for prompt in prompts]
    for size in (2, 3, 6, 6):
        together: dict[int, str] = {}

        def ask(number: int, into: dict[int, str]) -> None:
            into[number] = greedy(tiny, prompts[number], 12)

        threads = [threading.Thread(target=ask, args=(number, together)) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [together[number] for number in range(size)] == alone[:size]


def test_a_seed_repeats_the_draw(tiny: Scripted) -> None:
    body = {"model": MODEL, "prompt": spelled("the"), "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    first = send(tiny, "/v1/completions", body).json
    again = send(tiny, "/v1/completions", body | {"seed": first["seed"]}).json
    other = send(tiny, "/v1/completions", body | {"seed": first["seed"] + 1}).json
    assert again["choices"][0]["text"] == first["choices"][0]["text"] != other["choices"][0]["text"]
    two = send(tiny, "/v1/completions", body | {"seed": first["seed"], "n": 2}).json["choices"]
    assert two[0]["text"] == first["choices"][0]["text"] != two[1]["text"]


def test_logprobs_are_the_models(tiny: Scripted) -> None:
    import torch

    ids = spelled(*"the sky")
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    got = send(tiny, "/v1/completions", body).json["choices"][0]["logprobs"]
    wanted = oracle_logits(TINY, ids)[-1].log_softmax(-1)
    best = wanted.topk(3)
    assert got["token_logprobs"][0] == pytest.approx(float(best.values[0]), abs=1e-4)
    assert sorted(got["top_logprobs"][0].values(), reverse=True) == pytest.approx([float(v) for v in best.values], abs=1e-4)
    assert isinstance(best.indices, torch.Tensor)


def test_a_stop_string_ends_the_sequence_in_the_engine(tiny: Scripted) -> None:
    text = greedy(tiny, spelled("the"), 24)
    stop = text[3:5]
    body = {"model": MODEL, "prompt": spelled("the"), "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop": stop}
    choice = send(tiny, "/v1/completions", body).json["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    until(lambda: all(model["requests"] == 0 for model in tiny.get("/api/ps").json["models"]) or None)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_b28_unicode_in_every_path_under_the_c_locale(tmp_path: Path, form: Literal["NFC", "NFD"], mode: str) -> None:
    """Store, sockets, temporary files and the model itself, in folders that a C locale cannot spell."""
    home = tmp_path / unicodedata.normalize(form, "Ж é 模型 ")
    model = home / unicodedata.normalize(form, "m é 1.gguf")
    (home / "tmp").mkdir(parents=True)
    model.write_bytes(gguf_bytes(llama_gguf(TINY.config, TINY.tensors, byte_vocabulary(320))))
    env = {"LANG": "C", "LC_ALL": "C", "TMPDIR": str(home / "tmp"), "HOME": str(home)}
    with running(home, "--log-file", str(home / "daemon.log"), module="daemon", env=env) as process:
        daemon = Scripted(process, home)
        fields = {"path": str(model), "name": "модель/é", "mode": mode}
        assert ndjson(daemon.post("/api/import", fields).body)[-1]["status"] == "success"
        body = {"model": "МОДЕЛЬ/é", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
        choice = send(daemon, "/v1/completions", body).json["choices"][0]
        wanted = oracle_logits(TINY, [5, 6, 7, *oracle_greedy(TINY, [5, 6, 7], 8)])[2:-1].log_softmax(-1).amax(-1)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted.tolist(), abs=1e-3)
        assert process.end() == 0
        assert "Traceback" not in daemon.log


# --- the real model -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(real_model_path: Path) -> Iterator[Scripted]:
    with real_daemon(real_model_path, REAL) as daemon:
        yield daemon


QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]


def test_the_real_model_answers_in_both_dialects_streamed_and_not(real: Scripted) -> None:
    body = {"model": REAL, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = send(real, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert "Berlin" in whole
    streamed = sse(send(real, "/v1/chat/completions", body | {"stream": True}).body)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed[:-1]) == whole
    native = {"model": REAL, "messages": QUESTION, "options": {"temperature": 0, "num_predict": 16}}
    lines = ndjson(send(real, "/api/chat", native).body)
    assert "".join(line["message"]["content"] for line in lines) == whole
    assert lines[-1]["prompt_eval_count"] > 10 and lines[-1]["timings"]["predicted_per_second"] > 0


def test_the_real_worker_is_killed_and_the_next_request_works(real: Scripted) -> None:
    body = {"model": REAL, "messages": QUESTION, "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with real.client() as client:
        client.sock.settimeout(110)
        client.send(post("/v1/chat/completions", body))
        client.head()
        client.chunk()
        os.kill(real.get("/api/ps").json["models"][0]["pid"], signal.SIGKILL)
        events = sse(b"".join(iter(client.chunk, b"")))
    assert events[-2]["error"]["code"] == "worker_died" and events[-1] == "[DONE]"
    again = send(real, "/v1/chat/completions", body | {"max_tokens": 4, "stream": False})
    assert again.status == 200 and again.json["usage"]["completion_tokens"] == 4


def test_special_tokens_of_a_user_stay_text(real: Scripted) -> None:
    plain = send(real, "/v1/chat/completions", {"model": REAL, "messages": QUESTION, "max_tokens": 1}).json["usage"]
    typed = [{"role": "user", "content": "What is the capital of Germany?<|im_end|>"}]
    usage = send(real, "/v1/chat/completions", {"model": REAL, "messages": typed, "max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] - plain["prompt_tokens"] > 3


def test_too_long_for_the_real_model(real: Scripted) -> None:
    reply = send(real, "/v1/chat/completions", {"model": REAL, "messages": [{"role": "user", "content": "sky " * 9000}]})
    assert (reply.status, reply.code) == (400, "context_length_exceeded") and " 8192" in reply.json["error"]["message"]
