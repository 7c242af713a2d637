"""Rows of cases.md about text: characters split over tokens, stop strings, BOS, lengths, empty input, continued messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.daemon.scripted import MODEL, Scripted, ndjson, shown, spelled, sse
from tests.fixtures.tiny_tok import IM_END


def openai_deltas(body: bytes) -> list[str]:
    chunks = [event for event in sse(body) if event != "[DONE]" and event["choices"]]
    return [text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content"))]


def both_ways(daemon: Scripted, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """The deltas of a stream and the choice of the same request not streamed."""
    deltas = openai_deltas(daemon.chat(stream=True, **fields).body)
    return deltas, daemon.chat(**fields).json["choices"][0]


# --- B01 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (spelled("é🙂한".encode()), ["é", "🙂", "한"]),
        (spelled(b"\xf0", " ", "x"), ["\ufffd ", "x"]),
        (spelled("o", b"\xf0\x9f"), ["o", "\ufffd"]),
        (spelled(b"\xff\xfe", "x"), ["\ufffd", "\ufffd", "x"]),
        (spelled(b"\xed\xa0\x80", "x"), ["\ufffd" * 3, "x"]),
    ],
    ids=["split", "lone lead byte", "ends in mid-character", "never valid", "encoded surrogate"],
)
@pytest.mark.parametrize("end", [[], [IM_END]], ids=["end", "end token"])
def test_b01_characters_are_whole(daemon: Scripted, script: list[int], expected: list[str], end: list[int]) -> None:
    daemon.script(script + end)
    deltas, choice = both_ways(daemon)
    assert deltas == expected
    assert choice["message"]["content"] == "".join(deltas)
    lines = ndjson(daemon.ollama().body)
    assert [line["message"]["content"] for line in lines if line["message"]["content"]] == expected


# --- B02, B03 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "stop", "deltas", "reason"),
    [
        (["DEF", "G", "HI", "J", "K"], "DEFGHIJ", [], "stop"),
        (["DEF", "G", "X"], "DEFGHIJ", ["DEFGX"], "stop"),
        (["A", "DEF", "G"], "DE", ["A"], "stop"),
        (["A", "ing", "x"], "in", ["A"], "stop"),
        (["A", "ing", "x"], "ng", ["Ai"], "stop"),
        (["the", " sky", "x"], "e s", ["th"], "stop"),
        (["x", "a", "b", "c"], ["ab", "abc"], ["x"], "stop"),
        (["a", "a", "b"], "aab", [], "stop"),
        (["a", "a", "a", "b", "x"], "aab", ["a"], "stop"),
        (["x", "é", "y"], "é", ["x"], "stop"),
    ],
)
def test_b02_b03_stop_strings(daemon: Scripted, script: list[str], stop: Any, deltas: list[str], reason: str) -> None:
    """ "ing", "the" and " sky" are one token each; other words come letter by letter."""
    assert [len(spelled(word)) for word in ("ing", "the", " sky", "DEF")] == [1, 1, 1, 3]
    daemon.script(spelled(*script), spelled(*script))
    got, choice = both_ways(daemon, stop=stop)
    assert "".join(got) == "".join(deltas)
    assert choice["message"]["content"] == "".join(deltas)
    assert choice["finish_reason"] == reason
    assert "".join(line["message"]["content"] for line in ndjson(daemon.ollama(options={"stop": stop}).body)) == "".join(deltas)


def test_b02_only_what_may_match_is_held_back(daemon: Scripted) -> None:
    daemon.script(spelled(*"abcabd"))
    assert openai_deltas(daemon.chat(stream=True, stop="abd").body) == ["abc"]
    assert openai_deltas(daemon.chat(stream=True, stop="zzz").body) == list("abcabd")


def test_b03_included_once_when_asked_and_the_engine_is_told_to_end(daemon: Scripted) -> None:
    daemon.script(spelled(*"xDEFG"), repeat=True, every_ms=10)
    body = daemon.chat(stop="DE", include_stop_str_in_output=True).json
    assert body["choices"][0]["message"]["content"] == "xDE" and body["choices"][0]["finish_reason"] == "stop"
    assert [event["request"] for event in daemon.events("abort")] == [daemon.events("add")[0]["request"]["id"]]
    daemon.script(spelled("A", "ing", "x"))
    assert daemon.chat(stop="in", include_stop_str_in_output=True).json["choices"][0]["message"]["content"] == "Ain"
    deltas = openai_deltas(daemon.chat(stop=["in", "ing"], include_stop_str_in_output=True, stream=True).body)
    assert "".join(deltas) == "Ain", "of two stops the one complete first"


def test_b03_empty_stop_string(daemon: Scripted) -> None:
    for reply in (daemon.chat(stop=""), daemon.chat(stop=["a", ""]), daemon.ollama(options={"stop": [""]})):
        assert reply.status == 400 and reply.code == "invalid_request"


# --- B04 ----------------------------------------------------------------------------------------------------------------------


def test_b04_special_tokens_typed_by_a_user_stay_text(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    daemon.chat("<s><|im_end|>")
    assert shown(daemon.events("add")[0]["request"]["prompt"]).startswith("[<|im_start|>]user\n<s><|im_end|>[<|im_end|>]\n")


# --- B10, B11 -----------------------------------------------------------------------------------------------------------------


def test_b10_refused_with_both_numbers(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    for reply in (
        daemon.complete("x" * 100),
        daemon.complete([7] * 100),
        daemon.post("/api/generate", {"model": MODEL, "prompt": "x" * 100, "raw": True}),
    ):
        assert (reply.status, reply.code) == (400, "context_length_exceeded")
        error = reply.json["error"]
        assert " 100 " in str(error) and " 64" in str(error)
    assert daemon.complete("x" * 64).code == "context_length_exceeded"
    assert daemon.chat("x" * 60).code == "context_length_exceeded"
    assert daemon.events("add") == []


def test_b10_the_context_of_the_request_is_the_limit(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    raw = {"model": MODEL, "prompt": "x" * 20, "raw": True, "options": {"num_ctx": 20}}
    for reply in (daemon.complete("x" * 20, ctx=20), daemon.complete([7] * 20, num_ctx=20), daemon.post("/api/generate", raw)):
        assert (reply.status, reply.code) == (400, "context_length_exceeded")
        assert "has 20 tokens and the context holds 20" in str(reply.json["error"])
    for reply in (daemon.chat(ctx=10), daemon.ollama(options={"num_ctx": 10})):
        assert reply.code == "context_length_exceeded" and "holds 10" in str(reply.json["error"])
    assert daemon.complete("x" * 20, ctx=21).json["usage"]["completion_tokens"] == 1
    answer = daemon.post("/api/generate", raw | {"truncate": True, "stream": False}).json
    assert answer["truncated"]["tokens"] == 20 - answer["prompt_eval_count"] > 0
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"m{i}"} for i in range(5)]
    body = {"model": MODEL, "messages": messages, "stream": False, "truncate": True}
    assert "truncated" not in daemon.post("/api/chat", body).json
    answer = daemon.post("/api/chat", body | {"options": {"num_ctx": 40}}).json
    assert answer["truncated"]["messages"] > 0 and answer["prompt_eval_count"] < 40


def test_b10_a_hopeless_prompt_is_refused_untokenised(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    reply = daemon.complete("x" * 1_000_000)
    assert reply.code == "context_length_exceeded" and "at least" in reply.json["error"]["message"]


def test_b10_max_tokens_is_clamped_to_the_context(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True)
    body = daemon.complete("y" * 60, max_tokens=50).json
    assert body["choices"][0]["text"] == "xxxx" and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 60,
        "completion_tokens": 4,
        "total_tokens": 64,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_b10_ollama_truncates_only_when_asked_and_says_so(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"m{i}"} for i in range(9)]
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "S"}, *messages],
        "stream": False,
        "options": {"num_predict": 5},
    }
    assert daemon.post("/api/chat", body).code == "context_length_exceeded"
    reply = daemon.post("/api/chat", body | {"truncate": True})
    answer = reply.json
    prompt = daemon.events("add")[0]["request"]["prompt"]
    dropped = answer["truncated"]["messages"]
    assert dropped > 0 and reply.headers["x-cavectl-truncated"] == f"messages={dropped}, tokens=0"
    assert answer["prompt_eval_count"] == len(prompt) <= 64 - 5
    assert shown(prompt).startswith("[<|im_start|>]system\nS[<|im_end|>]") and "m8[" in shown(prompt)
    assert f"m{dropped - 1}[" not in shown(prompt) and f"m{dropped}[" in shown(prompt)
    raw = {"model": MODEL, "prompt": "s" + "y" * 100, "raw": True, "stream": False, "truncate": True}
    answer = daemon.post("/api/generate", raw).json
    assert answer["truncated"]["tokens"] == 101 - answer["prompt_eval_count"] > 0
    assert "s" not in shown(daemon.events("add")[1]["request"]["prompt"])
    assert "truncated" not in daemon.ollama(stream=False, truncate=True).json


def test_b10_a_last_message_that_cannot_fit_is_refused_all_the_same(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    assert daemon.ollama("x" * 70, truncate=True).code == "context_length_exceeded"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_b11_exactly_k_tokens(daemon: Scripted, count: int) -> None:
    daemon.script(spelled("x"), repeat=True)
    for field in ("max_tokens", "max_completion_tokens"):
        body = daemon.chat(**{field: count}).json
        assert body["choices"][0]["message"]["content"] == "x" * count
        assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == count
    last = ndjson(daemon.ollama(options={"num_predict": count}).body)[-1]
    assert last["eval_count"] == count and last["done_reason"] == "length"


@pytest.mark.parametrize("value", [0, -1, -2, 2**63, 2**31, 1.5, "2", True])
def test_b11_openai_refuses(daemon: Scripted, value: Any) -> None:
    for reply in (daemon.chat(max_tokens=value), daemon.complete(max_tokens=value)):
        assert (reply.status, reply.code) == (400, "invalid_request") and reply.json["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("value", [-1, -2, None])
def test_b11_until_the_context_is_full(daemon: Scripted, value: int | None) -> None:
    daemon.script(spelled("x"), repeat=True)
    last = ndjson(daemon.ollama(options={"num_predict": value}).body)[-1]
    assert last["eval_count"] + last["prompt_eval_count"] == 64 and last["done_reason"] == "length"
    if value is None:
        assert daemon.complete("yy", max_tokens=None).json["usage"]["completion_tokens"] == 62


def test_b11_ollama_zero_is_zero(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True)
    last = ndjson(daemon.ollama(options={"num_predict": 0}).body)[-1]
    assert last["eval_count"] == 0 and last["done_reason"] == "length" and last["prompt_eval_count"] > 0
    assert daemon.ollama(options={"num_predict": -3}).status == 400
    assert daemon.ollama(options={"num_predict": 2**63}).status == 400


def test_max_completion_tokens_wins(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True)
    assert daemon.chat(max_tokens=9, max_completion_tokens=2).json["usage"]["completion_tokens"] == 2


# --- B14, B15 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["x", ""], [[5], []]])
def test_b14_prompts_without_tokens(daemon: Scripted, prompt: Any) -> None:
    daemon.script(spelled("x"))
    reply = daemon.complete(prompt)
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert daemon.complete("fine").status == 200


@pytest.mark.parametrize("content", ["", None, []])
def test_b14_empty_messages_are_text(daemon: Scripted, content: Any) -> None:
    daemon.script(spelled("x"))
    reply = daemon.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": content}]})
    assert reply.status == 200
    assert shown(daemon.events("add")[0]["request"]["prompt"]).startswith("[<|im_start|>]user\n[<|im_end|>]")


def test_b14_no_messages(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    reply = daemon.post("/v1/chat/completions", {"model": MODEL, "messages": []})
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert daemon.chat().status == 200


def test_b15_the_last_message_is_continued(daemon: Scripted) -> None:
    daemon.script(spelled("4", "2"))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
    end = "[<|im_end|>]\n[<|im_start|>]assistant\nThe answer is "
    fields = {"model": MODEL, "messages": messages, "continue_final_message": True}
    for extra in ({}, {"add_generation_prompt": False}):
        reply = daemon.post("/v1/chat/completions", fields | extra)
        assert reply.json["choices"][0]["message"]["content"] == "42"
    native = daemon.post("/api/chat", {"model": MODEL, "messages": messages, "stream": False})
    assert native.json["message"]["content"] == "42"
    assert all(shown(event["request"]["prompt"]).endswith(end) for event in daemon.events("add"))
    assert len(daemon.events("add")) == 3


def test_b15_contradictions(daemon: Scripted) -> None:
    assistant, user = {"role": "assistant", "content": "The "}, {"role": "user", "content": "q"}
    for messages, fields in (
        ([user, assistant], {"continue_final_message": True, "add_generation_prompt": True}),
        ([assistant, user], {"continue_final_message": True}),
        ([], {"continue_final_message": True}),
    ):
        reply = daemon.post("/v1/chat/completions", {"model": MODEL, "messages": messages} | fields)
        assert (reply.status, reply.code) == (400, "invalid_request")
