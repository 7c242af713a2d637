"""The tables of request fields: closed, bounded, and the same over HTTP as in the table (S22, S23)."""

from __future__ import annotations

import math
import time
from typing import Any, get_args

import pytest

from daemon.api.errors import STATUS, BadField
from daemon.api.fields import GENERATION_TABLES, OLLAMA_OPTIONS
from daemon.api.readers import Field, Int, Num, Table
from engine.errors import ErrorCode
from tests.daemon.scripted import MODEL, Scripted, post, spelled

OPENAI = [path for path in GENERATION_TABLES if path.startswith("/v1/")]
OLLAMA = [path for path in GENERATION_TABLES if path.startswith("/api/")]
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "q"}]},
    "/v1/completions": {"model": MODEL, "prompt": "q"},
    "/api/chat": {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "stream": False},
    "/api/generate": {"model": MODEL, "prompt": "q", "stream": False},
}
TABLES: dict[str, Table] = {**GENERATION_TABLES, "options": OLLAMA_OPTIONS}

NUMERIC = [
    pytest.param(name, row, id=f"{name}:{row.name}")
    for name, table in TABLES.items()
    for row in table.rows.values()
    if isinstance(row.reader, Int | Num)
]
VALUES = [-(2**63), -1, 0, 5e-324, 1e308, math.nan, math.inf, True, "1", [], {}]


def accepts(row: Field, value: Any) -> bool:
    """By the row's own bounds, written once more: the oracle of the table test."""
    reader = row.reader
    assert isinstance(reader, Int | Num)
    if type(value) is int:
        ok = True
    elif type(value) is float:
        ok = isinstance(reader, Num) and math.isfinite(value)
    else:
        ok = False
    return ok and reader.low <= value <= reader.high and not (isinstance(reader, Num) and reader.above and value == reader.low)


@pytest.mark.parametrize(("table", "row"), NUMERIC)
def test_s23_every_number_has_bounds(table: str, row: Field) -> None:
    one = Table({row.name: row})
    assert math.isfinite(row.reader.low) and math.isfinite(row.reader.high)  # type: ignore[attr-defined]
    for value in VALUES:
        if accepts(row, value):
            one.read_fields("", {row.name: value})
        else:
            with pytest.raises(BadField) as caught:
                one.read_fields("", {row.name: value})
            assert caught.value.param == row.name and caught.value.code == "invalid_request"


# What each field takes at the edges, checked in: a changed bound shows here.
EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 2, 100], [-0.01, 100.01]),
    "top_p": ([0, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 2**31 - 1], [-2, 2**31, 1.0]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "repeat_penalty": ([1e-9, 10], [0, -1, 10.1]),
    "repeat_last_n": ([-1, 0, 2**31 - 1], [-2, 2**31]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([-(2**63), 2**64 - 1], []),
    "stop": (["x", ["x"] * 16, "é" * 128, []], ["", [""], ["x"] * 17, "x" * 257, "é" * 129, [1], {"a": 1}, 5, ["x"] * 10**5]),
}
OPENAI_EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 16], [0, -1, 17, 10**6, 1.5, "2", None, True]),
    "max_tokens": ([1, 2**31 - 1, None], [0, -1, 2**31, 2**63, 1.5, "2"]),
    "logit_bias": (
        [{}, {"5": -100, "7": 100.0}],
        [{"x": 1}, {"5": 101}, {"5": "1"}, [], {"-1": 1}, {str(i): 1 for i in range(1025)}],
    ),
    "stop_token_ids": ([[], [1, 2]], [[-1], ["1"], [True], [0] * 65, 5]),
    "min_tokens": ([0, 5], [-1, 1.5]),
    "ctx": ([1, 64], [0, -1, 2**31]),
    "priority": (["high", "normal", "low"], ["urgent", 1]),
    "stream_options": ([{}, {"include_usage": True}], [{"include_usage": 1}, {"usage": True}, 5]),
    "best_of": ([1], [2, 10**9]),
    "keep_alive": ([0, -1, "5m", None], ["abc", 1e308, True]),
}


def cells(edges: dict[str, tuple[list[Any], list[Any]]], tables: list[str]) -> list[Any]:
    return [
        pytest.param(table, name, good, bad, id=f"{table}:{name}")
        for table in tables
        for name, (good, bad) in edges.items()
        if name in TABLES[table].rows and not (name == "best_of" and table != "/v1/completions")
    ]


@pytest.mark.timing
@pytest.mark.parametrize(("table", "name", "good", "bad"), [*cells(EDGES, list(TABLES)), *cells(OPENAI_EDGES, OPENAI)])
def test_s22_edges(table: str, name: str, good: list[Any], bad: list[Any]) -> None:
    one = Table({name: TABLES[table].rows[name]})
    for value in good:
        one.read_fields("", {name: value})
    for value in bad:
        started = time.perf_counter()
        with pytest.raises(BadField) as caught:
            one.read_fields("", {name: value})
        assert time.perf_counter() - started < 0.05
        assert caught.value.param.startswith(name) and len(caught.value.message) < 300 and "\n" not in caught.value.message


def test_every_dialect_has_what_clients_send() -> None:
    wanted = {
        "/v1/chat/completions": "model messages stream stream_options max_tokens max_completion_tokens temperature top_p seed stop "
        "n presence_penalty frequency_penalty top_k min_p repeat_penalty repetition_penalty logit_bias logprobs top_logprobs tools "
        "tool_choice parallel_tool_calls response_format reasoning_effort keep_alive ctx num_ctx user metadata store service_tier",
        "/v1/completions": "model prompt suffix echo best_of max_tokens logprobs stream temperature stop n seed",
        "/api/chat": "model messages tools format options think stream keep_alive truncate shift logprobs top_logprobs",
        "/api/generate": "model prompt suffix system template context stream raw format keep_alive images options think truncate",
        "options": "num_keep seed num_predict top_k top_p min_p typical_p repeat_last_n temperature repeat_penalty "
        "presence_penalty frequency_penalty stop num_ctx num_batch num_gpu main_gpu use_mmap num_thread draft_num_predict",
    }
    for table, names in wanted.items():
        assert not set(names.split()) - TABLES[table].rows.keys()


def test_each_code_has_a_status() -> None:
    assert set(STATUS) == set(get_args(ErrorCode))


# --- over HTTP ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATION_TABLES)
def test_unknown_fields_are_named(daemon: Scripted, path: str) -> None:
    reply = daemon.post(path, BASE[path] | {"temprature": 1})
    assert (reply.status, reply.code) == (400, "unknown_field") and "`temprature`" in reply.body.decode()
    if path in OPENAI:
        assert reply.json["error"]["param"] == "temprature"
    else:
        nested = daemon.post(path, BASE[path] | {"options": {"temprature": 1}})
        assert nested.code == "unknown_field" and "`options.temprature`" in nested.json["error"]


@pytest.mark.parametrize("path", GENERATION_TABLES)
def test_refused_fields_are_named_and_their_neutral_values_pass(daemon: Scripted, path: str) -> None:
    daemon.script(spelled("x"))
    refused = [row for row in GENERATION_TABLES[path].rows.values() if row.kind == "refused"]
    assert refused
    for row in refused:
        reply = daemon.post(path, BASE[path] | {row.name: {"type": "something"}})
        assert (reply.status, reply.code) == (400, "unsupported") and f"`{row.name}`" in reply.body.decode()
    neutral = {row.name: row.neutral[0] for row in refused if row.neutral} | {row.name: None for row in refused if not row.neutral}
    assert daemon.post(path, BASE[path] | neutral).status == 200


def test_fields_without_effect_are_named(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    reply = daemon.chat(user="me", store=True)
    assert reply.status == 200 and reply.headers["x-cavectl-ignored"] == "user, store"
    native = daemon.ollama(options={"num_gpu": 99, "use_mmap": True, "num_thread": 4, "temperature": 0})
    assert native.status == 200 and native.headers["x-cavectl-ignored"] == "options.num_gpu, options.use_mmap, options.num_thread"
    assert daemon.ollama(options={"num_gpu": "many"}).status == 400
    assert "x-cavectl-ignored" not in daemon.chat().headers
    assert "without effect: user, store" in daemon.log


def test_sampling_reaches_the_engine(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    values = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -3},
        "seed": 42,
    }
    daemon.chat(**values, min_tokens=2, n=2, stop_token_ids=[9], priority="high", max_tokens=5)
    request = daemon.events("add")[0]["request"]
    assert request["sampling"] == values | {"logit_bias": {"5": -3.0}}
    assert request["min_tokens"] == 2 and request["n"] == 2 and request["priority"] == "high" and request["max_tokens"] == 5
    assert set(request["stop_ids"]) == {2, 4, 9} and request["client"].startswith("unix:")
    daemon.chat(ignore_eos=True, seed=-1)
    second = daemon.events("add")[1]["request"]
    assert "stop_ids" not in second and second["sampling"]["seed"] == 2**64 - 1 and second["sampling"]["temperature"] == 1


def test_ollama_defaults_and_options_reach_the_engine(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    daemon.ollama(options={"seed": -1})
    daemon.ollama(
        options={"temperature": 0, "top_k": 0, "top_p": 1.0, "repeat_penalty": 1.1, "seed": 7, "stop": ["q"], "num_predict": 3}
    )
    first, second = (event["request"] for event in daemon.events("add"))
    assert first["sampling"].items() >= {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.0}.items()
    wanted = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.1, "seed": 7}
    assert second["sampling"].items() >= wanted.items() and "top_k" not in second["sampling"] and second["max_tokens"] == 3


def test_a_drawn_seed_is_told_and_differs(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    seeds = {daemon.chat().json["seed"] for _ in range(4)} | {daemon.ollama(stream=False).json["seed"]}
    assert len(seeds) == 5 and all(0 <= seed < 2**53 for seed in seeds)
    assert seeds == {event["request"]["sampling"]["seed"] for event in daemon.events("add")}
    assert daemon.chat(seed=5).json["seed"] == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1"}}]}]},) * 1
        + ("messages[0].content[0]",),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        *(
            ({"messages": [{"role": "assistant", "content": "x", name: value}]}, f"messages[0].{name}")
            for name, value in (("tool_calls", {}), ("tool_calls", ""), ("tool_calls", [{}]), ("refusal", []), ("audio", []))
        ),
        ({"messages": None}, "messages"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_fields_are_named(daemon: Scripted, fields: dict[str, Any], param: str) -> None:
    reply = daemon.post("/v1/chat/completions", BASE["/v1/chat/completions"] | fields)
    assert reply.status == 400 and reply.json["error"]["param"] == param, reply.json


def test_message_fields_that_stand_for_nothing(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    nothing = {"tool_calls": [], "tool_call_id": "", "function_call": None, "refusal": None, "audio": None}
    message = {"role": "user", "content": "x"}
    assert daemon.post("/v1/chat/completions", {"model": MODEL, "messages": [message | nothing]}).status == 200
    for name, value, status in (("tool_calls", [], 200), ("images", [], 200), ("tool_calls", {}, 400), ("images", {}, 400)):
        assert daemon.post("/api/chat", {"model": MODEL, "messages": [message | {name: value}]}).status == status


def test_cost_is_bounded(daemon: Scripted) -> None:
    assert daemon.complete(["x"] * 65).status == 400
    assert daemon.complete(["x"] * 64, n=17).status == 400
    assert daemon.complete([[320]]).json["error"]["param"] == "prompt"


def test_text_parts_are_joined(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    daemon.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": parts}]})
    daemon.chat("a\nb")
    first, second = (event["request"]["prompt"] for event in daemon.events("add"))
    assert first == second


def test_headers_stand_for_fields_and_the_body_wins(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    body = BASE["/v1/chat/completions"]
    headers = {"X-Cavectl-Priority": "low", "X-Cavectl-Ctx": "32", "X-Cavectl-Keep-Alive": "-1"}
    with daemon.client() as client:
        for extra in ({}, {"priority": "high"}):
            client.send(post("/v1/chat/completions", body | extra, **headers))
            assert client.reply().status == 200
        client.send(post("/v1/chat/completions", body, **{"X-Cavectl-Ctx": "many"}))
        assert client.reply().json["error"]["param"] == "ctx"
    assert [event["request"]["priority"] for event in daemon.events("add")] == ["low", "high"]
    [model] = daemon.get("/api/ps").json["models"]
    assert model["expires_at"].startswith("9999")
    for event in daemon.events("add"):
        assert len(event["request"]["prompt"]) + event["request"]["max_tokens"] == 32
