"""What a client asks of the engine, from HTTP and back, against an oracle that recomputes everything: B17, B20, seeds.

One real worker with TinyRand. A request is sent cold and warm, alone and in company, in both dialects: the text may not differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import pytest

from tests.daemon.real_worker import real_daemon, send, text_of
from tests.daemon.scripted import MODEL, Scripted, ndjson, post, spelled, sse
from tests.daemon.wire import until
from tests.fixtures.tiny_rand import oracle_greedy, oracle_logits, tiny_rand
from tests.fixtures.tiny_tok import IM_END, IM_START, write_tiny_tok

TINY = tiny_rand(seed=7, context_tokens=4096)
PROMPT = spelled(*"hello the sky is blue, the sky is the sky")
COUNT = 16


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = TINY.save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    with real_daemon(folder, MODEL, kv_dtype="float32") as daemon:  # the oracle rounds nothing
        yield daemon


def oracle(
    prompt: Sequence[int] = PROMPT,
    *,
    repeat: float = 1.0,
    last_n: int = 64,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] = {},
    banned: Mapping[int, Sequence[int]] = {},
) -> list[int]:
    """COUNT greedy tokens after the prompt, in the order design.md gives: bias, repetition, presence and frequency.

    `banned`: ids that may not come as the output's token of that number.
    """
    output: list[int] = []
    while len(output) < COUNT:
        whole = [*prompt, *output]
        scores = oracle_logits(TINY, whole)[-1].tolist()
        window = whole if last_n < 0 else whole[max(0, len(whole) - last_n) :]
        for token in range(len(scores)):
            scores[token] += bias.get(token, 0.0)
            if token in window:
                scores[token] *= repeat if scores[token] < 0 else 1 / repeat
            if token in output:
                scores[token] -= presence + frequency * output.count(token)
            if token in banned.get(len(output), ()):
                scores[token] = float("-inf")
        best, second = sorted(scores, reverse=True)[:2]
        assert best - second > 1e-4, "too close for float32: take another prompt"
        output.append(scores.index(best))
    return output


def complete(daemon: Scripted, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    reply = send(daemon, "/v1/completions", body | fields)
    assert reply.status == 200, reply.body
    return reply.json


def text(daemon: Scripted, **fields: Any) -> str:
    return complete(daemon, **fields)["choices"][0]["text"]


PLAIN = oracle_greedy(TINY, PROMPT, COUNT)


# --- B17: penalties -------------------------------------------------------------------------------------------------------------


ONLY_LETTERS = dict.fromkeys(spelled(*"abcdefghijk"), 30.0)  # eleven tokens to choose from: a penalty on one always shows
LETTERED = spelled(*("fabcdegh" + "ij" * 40))


@pytest.mark.parametrize("last_n", [0, 1, 8, -1])
def test_b17_repetition_looks_at_the_last_n_of_prompt_and_output(daemon: Scripted, last_n: int) -> None:
    expected = text_of(oracle(LETTERED, repeat=2.0, last_n=last_n, bias=ONLY_LETTERS))
    fields = {"repeat_penalty": 2.0, "repeat_last_n": last_n, "logit_bias": {str(k): v for k, v in ONLY_LETTERS.items()}}
    daemon.unload()
    cold, warm = (text(daemon, prompt=LETTERED, **fields) for _ in range(2))
    assert cold == warm == expected


def test_b17_another_window_gives_another_text() -> None:
    """Or the test above could not fail: one token more or fewer shows."""
    windows = (0, 1, 2, 7, 8, 9, 64, -1)
    assert len({tuple(oracle(LETTERED, repeat=2.0, last_n=n, bias=ONLY_LETTERS)) for n in windows}) == len(windows)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-1.5, 0.0), (1.0, -1.0)])
def test_b17_presence_and_frequency_count_output_only(daemon: Scripted, presence: float, frequency: float) -> None:
    expected = text_of(oracle(presence=presence, frequency=frequency))
    daemon.unload()
    fields = {"presence_penalty": presence, "frequency_penalty": frequency}
    assert text(daemon, **fields) == text(daemon, **fields) == expected


def test_b17_the_ollama_names_mean_the_same(daemon: Scripted) -> None:
    prompt = "hello the sky is blue, the sky is the sky"
    body = {"model": MODEL, "prompt": prompt, "raw": True, "stream": False}
    texts = []
    for penalties in (
        {"repeat_penalty": 2.0, "repeat_last_n": 0},
        {"repeat_penalty": 2.0, "repeat_last_n": 8},
        {"repeat_penalty": 2.0, "repeat_last_n": -1},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
    ):
        options = {"temperature": 0, "num_predict": COUNT} | penalties
        texts.append(send(daemon, "/api/generate", body | {"options": options}).json["response"])
        assert texts[-1] == text(daemon, prompt=prompt, ignore_eos=False, **penalties)
    assert texts[0] == text(daemon, prompt=prompt, ignore_eos=False) and texts[0] not in texts[1:]


# --- bias, ends, log-probabilities ----------------------------------------------------------------------------------------------


def test_logit_bias_bans_and_forces(daemon: Scripted) -> None:
    best, other = PLAIN[0], spelled("Q")[0]
    assert text(daemon, logit_bias={str(best): -100}) == text_of(oracle(bias={best: -100.0})) != text_of(PLAIN)
    assert text(daemon, logit_bias={str(other): 100}) == "Q" * COUNT
    small = {PLAIN[1]: -0.25, spelled("e")[0]: 0.5}
    assert text(daemon, logit_bias={str(k): v for k, v in small.items()}) == text_of(oracle(bias=small))


def test_a_stop_id_ends_the_text_before_itself(daemon: Scripted) -> None:
    at = next(i for i in range(2, COUNT) if PLAIN[i] not in PLAIN[:i])
    body = complete(daemon, stop_token_ids=[PLAIN[at]])
    assert body["choices"][0]["text"] == text_of(PLAIN[:at]) and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == at + 1


@pytest.mark.parametrize("count", [1, 3, COUNT - 1])
def test_min_tokens_bans_the_stop_ids_until_then(daemon: Scripted, count: int) -> None:
    """The id that would come first is a stop id: it is skipped for `count` tokens, and ends the text when it comes next."""
    stop = PLAIN[0]
    expected = oracle(bias={stop: 3.0}, banned={i: [stop] for i in range(count)})
    end = expected.index(stop) if stop in expected else COUNT
    body = complete(daemon, stop_token_ids=[stop], min_tokens=count, logit_bias={str(stop): 3.0})
    assert end >= count and body["choices"][0]["text"] == text_of(expected[:end])
    assert body["choices"][0]["finish_reason"] == ("stop" if end < COUNT else "length")
    assert complete(daemon, stop_token_ids=[stop], logit_bias={str(stop): 3.0})["choices"][0]["text"] == ""


def test_the_end_token_of_the_model_ends_the_text(daemon: Scripted) -> None:
    body = complete(daemon, ignore_eos=False, logit_bias={str(IM_END): 100}, min_tokens=2)
    assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == 3
    ignored = complete(daemon, ignore_eos=True, logit_bias={str(IM_END): 100})
    assert ignored["choices"][0]["finish_reason"] == "length" and ignored["usage"]["completion_tokens"] == COUNT


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_every_token_are_the_models_own(daemon: Scripted, stream: bool) -> None:
    """Neither temperature nor top-k nor bias changes what is reported, only what is drawn."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the sky"}], "logprobs": True, "top_logprobs": 3}
    body |= {"temperature": 0.7, "top_k": 5, "seed": 9, "max_tokens": 8, "stream": stream}
    body |= {"logit_bias": {str(token): 50 for token in spelled(*"abcdefgh")}}
    reply = send(daemon, "/v1/chat/completions", body)
    bodies = sse(reply.body)[:-1] if stream else [reply.json]
    entries = [x for each in bodies for choice in each["choices"] if choice["logprobs"] for x in choice["logprobs"]["content"]]
    drawn = [entry["token"] for entry in entries]
    assert len(drawn) == 8 and set(drawn) <= set("abcdefgh") and len(set(drawn)) > 1
    whole = spelled(IM_START, "user", "\n", "the", " sky", IM_END, "\n", IM_START, "a", "s", "s", "is", "t", "an", "t", "\n")
    for entry in entries:
        expected = oracle_logits(TINY, whole)[-1].log_softmax(-1)
        whole += spelled(entry["token"])
        assert entry["logprob"] == pytest.approx(float(expected[whole[-1]]), abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


# --- seeds ----------------------------------------------------------------------------------------------------------------------


def sampled(daemon: Scripted, seed: int, **fields: Any) -> list[str]:
    body = complete(daemon, seed=seed, temperature=1.3, top_p=0.95, repeat_penalty=1.2, **fields)
    return [choice["text"] for choice in body["choices"]]


def together(works: list[Any]) -> list[Any]:
    """The results of all of them, run at the same time."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        results[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_seed_gives_the_same_text_alone_and_in_company(daemon: Scripted) -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 7, 8]
    alone = [sampled(daemon, seed) for seed in seeds]
    assert len({tuple(texts) for texts in alone}) == len(seeds)
    for _ in range(3):
        noise = [lambda n=n: complete(daemon, prompt=PROMPT[: 3 + n * 5], temperature=1.0, max_tokens=4 + n * 7) for n in range(5)]
        assert together([lambda seed=seed: sampled(daemon, seed) for seed in seeds] + noise)[: len(seeds)] == alone
    daemon.unload()
    assert sampled(daemon, 7) == alone[4]


def test_a_choice_of_a_seed_is_the_same_whatever_the_number_of_choices(daemon: Scripted) -> None:
    four = sampled(daemon, 11, n=4)
    assert len(set(four)) == 4
    assert sampled(daemon, 11) == four[:1] and sampled(daemon, 11, n=2) == four[:2]


def test_a_seed_means_the_same_in_both_dialects_streamed_or_not(daemon: Scripted) -> None:
    fields = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 5}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "the sky"}]}
    whole = send(daemon, "/v1/chat/completions", chat | fields | {"max_tokens": 12}).json["choices"][0]["message"]["content"]
    events = sse(send(daemon, "/v1/chat/completions", chat | fields | {"max_tokens": 12, "stream": True}).body)[:-1]
    lines = ndjson(send(daemon, "/api/chat", chat | {"options": fields | {"num_predict": 12, "min_p": 0.0}}).body)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole
    assert "".join(line["message"]["content"] for line in lines) == whole


# --- keep-alive -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_alive", [0, "300ms"])
def test_a_model_that_is_not_kept_alive_gives_its_process_back(daemon: Scripted, keep_alive: Any) -> None:
    text(daemon, keep_alive=-1)
    pid = daemon.get("/api/ps").json["models"][0]["pid"]
    assert psutil.pid_exists(pid)
    assert text(daemon, keep_alive=keep_alive) == text_of(PLAIN)
    until(lambda: not psutil.pid_exists(pid) or None)
    assert daemon.get("/api/ps").json == {"models": []}
    assert text(daemon) == text_of(PLAIN)


# --- leaving, and what the worker holds -----------------------------------------------------------------------------------------


def metric(daemon: Scripted, name: str) -> float:
    lines = daemon.get("/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"llamacpp:{name} "))


def test_b20_clients_that_leave_give_their_pages_back(daemon: Scripted) -> None:
    """In mid-prompt, in mid-stream and while waiting for a whole answer, on both sockets: the cache is empty again."""
    assert text(daemon) == text_of(PLAIN)
    assert metric(daemon, "kv_cache_usage_ratio") == 0
    body = {"model": MODEL, "prompt": PROMPT * 20, "temperature": 0, "ignore_eos": True, "n": 2}
    clients = []
    for kind in ("unix", "tcp"):
        for stream in (True, False):
            clients.append(daemon.client(kind))
            clients[-1].send(post("/v1/completions", body | {"stream": stream}))
    assert clients[0].head()[0] == 200 and clients[0].chunk()
    until(lambda: metric(daemon, "kv_cache_usage_ratio") > 0 or None)
    for client in clients:
        client.close()
    until(lambda: (metric(daemon, "requests_processing") == 0 and metric(daemon, "kv_cache_usage_ratio") == 0) or None)
    steps = metric(daemon, "n_decode_total")
    time.sleep(0.3)
    assert metric(daemon, "n_decode_total") == steps
    assert text(daemon) == text_of(PLAIN)


def test_s14_no_child_of_the_daemon_holds_a_network_socket(daemon: Scripted) -> None:
    """Workers and helpers speak over inherited pairs only; the one listener is the daemon's own."""
    send(daemon, "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "max_tokens": 1})
    process = psutil.Process(daemon.daemon.process.pid)
    children = process.children(recursive=True)
    assert daemon.get("/api/ps").json["models"][0]["pid"] in {child.pid for child in children} and len(children) > 1
    assert [child.net_connections("inet") for child in children] == [[]] * len(children)
    listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert [tuple(each.laddr) for each in listening] == [("127.0.0.1", daemon.daemon.shown["port"])]
