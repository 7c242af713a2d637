"""The whole way: HTTP in, scripted tokens through the pipeline, text out, in both dialects, streamed and not."""

from __future__ import annotations

from tests.daemon.api.conftest import Scripted
from tests.daemon.scripted import MODEL, ndjson, shown, spelled, sse
from tests.fixtures.tiny_tok import IM_END


def test_openai_stream(daemon: Scripted) -> None:
    daemon.script(spelled("h", "e", "ll", "o"))
    reply = daemon.chat(stream=True, stream_options={"include_usage": True})
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"].startswith("req-")
    *chunks, finish, usage, done = sse(reply.body)
    assert done == "[DONE]"
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:]] == ["h", "e", "ll", "o"]
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert {chunk["id"] for chunk in [*chunks, finish, usage]} == {chunks[0]["id"]}


def test_openai_whole(daemon: Scripted) -> None:
    daemon.script(spelled("h", "e", "ll", "o", IM_END))
    reply = daemon.chat()
    body = reply.json
    assert reply.status == 200 and body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = daemon.events("add")[0]["request"]["prompt"]
    assert shown(prompt) == "[<|im_start|>]user\nhello[<|im_end|>]\n[<|im_start|>]assistant\n"
    assert body["usage"]["prompt_tokens"] == len(prompt) and body["usage"]["completion_tokens"] == 5
    assert isinstance(body["seed"], int) and body["seed"] == daemon.events("add")[0]["request"]["sampling"]["seed"]
    assert body["timings"]["predicted_n"] == 5 and body["timings"]["ttft_ms"] > 0


def test_ollama_stream(daemon: Scripted) -> None:
    daemon.script(spelled("h", "e", "ll", "o"))
    reply = daemon.ollama()
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    *lines, last = ndjson(reply.body)
    assert [line["message"] for line in lines] == [{"role": "assistant", "content": text} for text in ("h", "e", "ll", "o")]
    assert all(line["done"] is False and line["model"] == MODEL for line in lines)
    assert last["done"] is True and last["done_reason"] == "stop" and last["message"]["content"] == ""
    assert last["eval_count"] == 4 and last["total_duration"] >= last["load_duration"] > 0
    assert last["prompt_eval_count"] == last["usage"]["prompt_tokens"]


def test_ollama_whole_and_generate(daemon: Scripted) -> None:
    daemon.script(spelled("h", "e", "ll", "o"))
    assert daemon.ollama(stream=False).json["message"]["content"] == "hello"
    generated = daemon.post("/api/generate", {"model": MODEL, "prompt": "hello", "stream": False}).json
    assert generated["response"] == "hello" and generated["done_reason"] == "stop"
    raw = daemon.post("/api/generate", {"model": MODEL, "prompt": "hello", "raw": True, "stream": False}).json
    assert raw["response"] == "hello" and raw["prompt_eval_count"] == len(spelled("he", "ll", "o"))
    prompts = [shown(event["request"]["prompt"]) for event in daemon.events("add")]
    assert prompts[1:] == ["[<|im_start|>]user\nhello[<|im_end|>]\n[<|im_start|>]assistant\n", "hello"]


def test_completions(daemon: Scripted) -> None:
    daemon.script(spelled("a"), spelled("b"), spelled("c"))
    body = daemon.complete(["x", "y", "z"]).json
    came = [event["request"]["prompt"] for event in daemon.events("add")]
    assert sorted(came) == [spelled("x"), spelled("y"), spelled("z")]
    wanted = {tuple(prompt): "abc"[number] for number, prompt in enumerate(came)}
    assert [choice["text"] for choice in body["choices"]] == [wanted[tuple(spelled(prompt))] for prompt in "xyz"]
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert daemon.complete([7, 8, 9]).status == 200
    assert daemon.events("add")[3]["request"]["prompt"] == [7, 8, 9]


def test_completion_stream(daemon: Scripted) -> None:
    """One event per token, then the reason, then the usage if asked, then [DONE]; no event has a role."""
    daemon.script(spelled("h", "e", "ll", "o"))
    *chunks, finish, usage, done = sse(daemon.complete(stream=True, stream_options={"include_usage": True}).body)
    assert done == "[DONE]" and [chunk["choices"][0]["text"] for chunk in chunks] == ["h", "e", "ll", "o"]
    assert all(chunk["object"] == "text_completion" and chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert finish["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert sse(daemon.complete(stream=True).body)[-2]["choices"][0]["finish_reason"] == "stop"


def test_ollama_generate_stream(daemon: Scripted) -> None:
    daemon.script(spelled("h", "e", "ll", "o"))
    *lines, last = ndjson(daemon.post("/api/generate", {"model": MODEL, "prompt": "hello"}).body)
    assert [(line["response"], line["done"]) for line in lines] == [(text, False) for text in ("h", "e", "ll", "o")]
    assert (last["response"], last["done"], last["done_reason"], last["eval_count"]) == ("", True, "stop", 4)
