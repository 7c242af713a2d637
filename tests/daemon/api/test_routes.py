"""Routes about models, and the parts of an answer that are neither text nor errors: choices, log-probabilities, usage, metrics."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from daemon.app import build_routes
from tests.daemon.scripted import MODEL, Scripted, ndjson, scripted_daemon, spelled, sse
from tests.daemon.wire import until

ROUTES = {
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/api/version"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("POST", "/api/show"),
    ("POST", "/api/pull"),
    ("POST", "/api/import"),
    ("POST", "/api/verify"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/generate"),
    ("POST", "/api/chat"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id:path}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("DELETE", "/v1/requests/{id}"),
}


def parsed(moment: str) -> datetime:
    return datetime.fromisoformat(moment)


def test_s31_these_routes_and_no_others(tiny_model: Path) -> None:
    from unittest.mock import MagicMock

    found = {(method, route.path) for route in build_routes(MagicMock()) for method in route.methods or () if method != "HEAD"}
    assert found == ROUTES


def test_version_and_root(daemon: Scripted) -> None:
    version = daemon.get("/api/version").json
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4) and version["cavectl"]
    assert daemon.get("/").body == b"cavectl is running"
    assert all(daemon.get(path).headers["x-request-id"].startswith("req-") for path in ("/", "/api/version", "/v1/models"))


def test_tags_and_models(daemon: Scripted) -> None:
    [tag] = daemon.get("/api/tags").json["models"]
    assert tag["name"] == tag["model"] == MODEL and tag["size"] > 1000 and len(tag["digest"]) == 64
    assert tag["details"]["family"] == "llama" and tag["details"]["format"] == "safetensors" and tag["details"]["parameter_size"]
    assert "completion" in tag["capabilities"] and parsed(tag["modified_at"])
    [model] = daemon.get("/v1/models").json["data"]
    assert model["id"] == MODEL and model["object"] == "model" and model["meta"]["n_ctx_train"] == 64
    assert daemon.get(f"/v1/models/{MODEL}").json == model
    assert daemon.get("/v1/models/TINY/rand").json["id"] == MODEL


def test_show_has_what_editors_look_for(daemon: Scripted) -> None:
    shown = daemon.post("/api/show", {"model": MODEL}).json
    assert shown["model_info"]["general.architecture"] == "llama" and shown["model_info"]["general.basename"]
    assert shown["model_info"]["llama.context_length"] == 64 and shown["capabilities"] == ["completion"]
    assert "im_start" in shown["chat_template"] and shown["details"]["context_length"] == 64
    assert daemon.post("/api/show", {"name": MODEL, "verbose": True}).json["digest"] == shown["digest"]


def test_ps_tells_the_life_of_a_model(daemon: Scripted) -> None:
    assert daemon.get("/api/ps").json == {"models": []}
    daemon.script(spelled("x"), repeat=True, every_ms=30, load_ms=400)
    asked = threading.Thread(target=lambda: daemon.chat(max_tokens=20))
    asked.start()
    loading = until(lambda: next(iter(daemon.get("/api/ps").json["models"]), None))
    assert loading["state"] == "loading" and loading["pid"] is None and loading["requests"] == 1
    running = until(lambda: next((m for m in daemon.get("/api/ps").json["models"] if m["state"] == "ready"), None))
    assert running["requests"] == 1 and running["pid"] and running["backend"] == "scripted" and running["context_length"] == 64
    asked.join()
    [idle] = daemon.get("/api/ps").json["models"]
    assert idle["requests"] == 0 and 290 < (parsed(idle["expires_at"]) - datetime.now(UTC)).total_seconds() <= 300


@pytest.mark.parametrize(
    ("value", "seconds"), [(-1, None), ("-1", None), ("-1m", None), ("5m", 300), ("1h30m", 5400), (300, 300), (None, 300)]
)
def test_b21_keep_alive(daemon: Scripted, value: Any, seconds: float | None) -> None:
    daemon.script(spelled("x"))
    for reply in (daemon.ollama(keep_alive=value), daemon.chat(keep_alive=value)):
        assert reply.status == 200
        expires = parsed(daemon.get("/api/ps").json["models"][0]["expires_at"])
        left = (expires - datetime.now(UTC)).total_seconds()
        assert left > 10**9 if seconds is None else seconds - 10 < left <= seconds


@pytest.mark.parametrize("value", [0, "0"])
def test_b21_zero_unloads_when_idle(daemon: Scripted, value: Any) -> None:
    daemon.script(spelled("x"))
    assert daemon.ollama(keep_alive=value).status == 200
    until(lambda: daemon.get("/api/ps").json["models"] == [] or None)


@pytest.mark.parametrize("value", ["abc", 1e308, True, [], ""])
def test_b21_refused(daemon: Scripted, value: Any) -> None:
    for reply in (daemon.ollama(keep_alive=value), daemon.chat(keep_alive=value)):
        assert (reply.status, reply.code) == (400, "invalid_request") and "keep_alive" in reply.body.decode()


def test_load_and_unload_through_empty_prompts(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    loaded = daemon.post("/api/generate", {"model": MODEL}).json
    assert loaded["done"] is True and loaded["done_reason"] == "load" and loaded["response"] == ""
    assert len(daemon.get("/api/ps").json["models"]) == 1
    unloaded = daemon.post("/api/chat", {"model": MODEL, "messages": [], "keep_alive": 0}).json
    assert unloaded["done_reason"] == "unload" and unloaded["message"]["content"] == "" and unloaded["was_loaded"] is True
    assert daemon.get("/api/ps").json == {"models": []} and daemon.events("shutdown")
    assert daemon.post("/api/generate", {"model": MODEL, "keep_alive": 0}).json["was_loaded"] is False


def test_context_of_a_request(daemon: Scripted) -> None:
    """A smaller one binds its own request; the model is loaded with what the others need all the same."""
    daemon.script(spelled("x"), repeat=True)
    last = daemon.ollama(options={"num_ctx": 40}, stream=False).json
    assert last["context_length"] == last["prompt_eval_count"] + last["eval_count"] == 40 and last["done_reason"] == "length"
    assert daemon.chat(ctx=48, max_tokens=64).json["usage"]["total_tokens"] == 48
    assert daemon.chat(num_ctx=64).json["usage"]["total_tokens"] == 64
    assert daemon.chat().json["usage"]["total_tokens"] == 64
    assert [event["context"] for event in daemon.events("load")] == [64]
    assert (daemon.chat(ctx=65).status, daemon.chat(ctx=65).code) == (400, "invalid_request")


def test_import_remove_and_a_removed_model_that_runs(daemon: Scripted, tiny_model: Path) -> None:
    lines = ndjson(daemon.post("/api/import", {"path": str(tiny_model), "name": "tiny/other"}).body)
    assert lines.pop() == {"status": "success", "model": "tiny/other:latest"}
    assert all(set(line) <= {"status", "file", "digest", "total", "completed"} for line in lines)
    daemon.script(spelled("x"), repeat=True, every_ms=30)
    body = {"model": "tiny/other", "messages": [{"role": "user", "content": "q"}], "max_tokens": 20}
    done: list[Any] = []
    asked = threading.Thread(target=lambda: done.append(daemon.post("/v1/chat/completions", body)))
    asked.start()
    until(lambda: daemon.events("add") or None)
    pid = daemon.get("/api/ps").json["models"][0]["pid"]
    assert daemon.post("/api/delete", {"model": "tiny/other"}, method="DELETE").json == {"status": "success"}
    assert daemon.get("/api/ps").json == {"models": []} and len(daemon.get("/api/tags").json["models"]) == 1
    assert daemon.post("/v1/chat/completions", body).code == "model_not_found"
    asked.join()
    assert done[0].json["usage"]["completion_tokens"] == 20
    until(lambda: not Path(f"/proc/{pid}").exists() or None)
    assert daemon.post("/api/delete", {"model": "tiny/other"}, method="DELETE").status == 404


def test_import_without_progress(daemon: Scripted, tiny_model: Path) -> None:
    reply = daemon.post("/api/import", {"path": str(tiny_model), "name": "tiny/third", "mode": "copy", "stream": False})
    assert reply.json == {"status": "success", "model": "tiny/third:latest"}
    assert daemon.post("/api/delete", {"name": "tiny/third"}, method="DELETE").status == 200


# --- answers ------------------------------------------------------------------------------------------------------------------


def test_choices(daemon: Scripted) -> None:
    daemon.script(spelled("a", "b"), spelled("c"), spelled("d", "e", "f"))
    body = daemon.chat(n=3).json
    assert [choice["message"]["content"] for choice in body["choices"]] == ["ab", "c", "def"]
    assert body["usage"]["completion_tokens"] == 6
    daemon.script(spelled("a", "b"), spelled("c"), spelled("d", "e", "f"))
    *chunks, done = sse(daemon.chat(n=3, stream=True).body)
    texts, ends = ["", "", ""], ["", "", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] or ""
    assert texts == ["ab", "c", "def"] and ends == ["stop"] * 3 and done == "[DONE]"


def test_stop_string_of_one_choice_leaves_the_others(daemon: Scripted) -> None:
    daemon.script(spelled("a", "S", "x"), spelled("b", "c", "d"), every_ms=10)
    body = daemon.chat(n=2, stop="S").json
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "bcd"]
    assert [event["choice"] for event in daemon.events("abort")] == [0]


def test_prompts_times_choices(daemon: Scripted) -> None:
    daemon.script(*(spelled(letter) for letter in "abcd"))
    body = daemon.complete(["x", "y"], n=2).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    first = [event["request"]["prompt"] for event in daemon.events("add")].index(spelled("x"))  # which of the two came first
    assert [choice["text"] for choice in body["choices"]] == [["a", "b", "b", "c"], ["b", "c", "a", "b"]][first]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_logprobs(daemon: Scripted) -> None:
    script = spelled("a", b"\xc3", b"\xa9", "b")
    daemon.script(script)
    body = daemon.chat(logprobs=True, top_logprobs=2).json
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9], [98]]
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["token"] == "a" and content[0]["top_logprobs"][1] == {"token": "b", "logprob": -1.5, "bytes": [98]}
    chunks = [event for event in sse(daemon.chat(logprobs=True, stream=True).body)[1:-1] if event["choices"][0]["logprobs"]]
    assert [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks] == [1, 2, 1], "pending bytes come with their text"
    native = ndjson(daemon.ollama(logprobs=True, top_logprobs=1).body)
    assert [entry["bytes"] for line in native for entry in line.get("logprobs", [])] == [[97], [0xC3], [0xA9], [98]]
    old = daemon.complete("q", logprobs=1).json["choices"][0]["logprobs"]
    assert old["tokens"][0] == "a" and old["token_logprobs"] == [-0.5] * 4 and old["text_offset"] == [0, 1, 1, 2]
    assert old["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert old["top_logprobs"][0] == {"a": -0.5}
    assert daemon.chat().json["choices"][0]["logprobs"] is None


def test_usage_counts_tokens_not_events(daemon: Scripted) -> None:
    daemon.script(spelled("é🙂".encode()))
    events = sse(daemon.chat(stream=True, stream_options={"include_usage": True}).body)
    assert sum(bool(event["choices"] and event["choices"][0]["delta"].get("content")) for event in events[:-2]) == 2
    assert events[-2]["usage"]["completion_tokens"] == 6 and events[-2]["timings"]["predicted_n"] == 6
    without = sse(daemon.chat(stream=True).body)
    assert without[-2]["choices"][0]["finish_reason"] == "stop" and isinstance(without[-2]["seed"], int)


def test_metrics(daemon: Scripted) -> None:
    daemon.script(spelled("x", "y"))

    def read() -> dict[str, float]:
        lines = daemon.get("/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}

    before = read()
    daemon.chat()
    after = read()
    assert after["llamacpp:tokens_predicted_total"] - before["llamacpp:tokens_predicted_total"] == 2
    assert after["llamacpp:prompt_tokens_total"] > before["llamacpp:prompt_tokens_total"]
    assert after["llamacpp:requests_processing"] == after["llamacpp:requests_deferred"] == 0


def test_template_missing(daemon: Scripted, tiny_model: Path, tmp_path: Path) -> None:
    import json
    import shutil

    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    daemon.script(spelled("x"))
    daemon.post("/api/import", {"path": str(bare), "name": "tiny/bare"})
    try:
        reply = daemon.post("/v1/chat/completions", {"model": "tiny/bare", "messages": [{"role": "user", "content": "q"}]})
        assert (reply.status, reply.code) == (400, "unsupported") and "chat template" in reply.json["error"]["message"]
        assert daemon.post("/v1/completions", {"model": "tiny/bare", "prompt": "q"}).status == 200
    finally:
        daemon.unload()
        daemon.post("/api/delete", {"model": "tiny/bare"}, method="DELETE")


def test_daemon_does_not_keep_descriptors(tiny_model: Path) -> None:
    """Ten loads and unloads, twenty requests each way: as many descriptors as before."""
    import psutil

    with scripted_daemon(tiny_model) as daemon:
        process = psutil.Process(daemon.daemon.process.pid)
        daemon.script(spelled("x"))
        daemon.chat()
        daemon.unload()
        before, threads = process.num_fds(), process.num_threads()
        for _ in range(10):
            daemon.script(spelled("x"))
            assert daemon.chat().status == daemon.ollama().status == 200
        daemon.unload()
        until(lambda: process.num_fds() <= before or None)
        assert process.num_threads() <= threads + 4
