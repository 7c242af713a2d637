"""`run` with a prompt, against a fake daemon: exact text, what is sent, signals, pipes that close, locales."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cavectl.conftest import ROOT, Home
from tests.cavectl.fake_daemon import MODEL, FakeDaemon, Reply


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["Hello", " world"], "Hello world\n"),
        (["ends\n"], "ends\n"),
        (["two\n\n"], "two\n\n"),
        (["é🙂", "\x1b[31mred\r\n", "\x00"], "é🙂\x1b[31mred\r\n\x00\n"),
        (["\ufffd", "한"], "\ufffd한\n"),
        ([], ""),
    ],
)
def test_piped_output_is_the_text_and_one_newline(home: Home, fake: FakeDaemon, pieces: list[str], expected: str) -> None:
    fake.replies["say it"] = Reply(pieces)
    done = home.run("run", "say it")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.encode(), b"")


def test_what_is_sent(home: Home, fake: FakeDaemon) -> None:
    done = home.run(
        "run", MODEL, "say", "it", "--system", "be é", "-o", "top_p=0.5", "-o", "stop=x", "--temp", "0", "--seed", "7",
        "--max-tokens", "5", "--ctx", "512", "--keep-alive", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert fake.bodies("/api/chat") == [
        {
            "messages": [{"role": "system", "content": "be é"}, {"role": "user", "content": "say it"}],
            "model": MODEL,
            "stream": True,
            "options": {"top_p": 0.5, "stop": ["x"], "temperature": 0.0, "seed": 7, "num_predict": 5},
            "ctx": 512,
            "keep_alive": 0.0,
        }
    ]


def test_raw_goes_past_the_template(home: Home, fake: FakeDaemon) -> None:
    assert home.run("run", "--raw", "Once upon").stdout == b"echo: Once upon\n"
    assert fake.bodies("/api/generate") == [{"prompt": "Once upon", "raw": True, "model": MODEL, "stream": True}]


def test_piped_input_comes_before_the_prompt(home: Home, fake: FakeDaemon) -> None:
    assert (
        home.run("run", "Sum", "up", stdin="Ж text\n".encode(), environ={"LC_ALL": "C"}).stdout.decode() == "echo: Ж text\nSum up\n"
    )
    assert home.run("run", stdin=b"only this\n").stdout == b"echo: only this\n"
    assert home.run("run", "x y", "--stdin=never", stdin=b"not this").stdout == b"echo: x y\n"


def test_an_open_pipe_without_a_writer_that_ends_is_explained(home: Home, fake: FakeDaemon) -> None:
    process = home.popen("run", "x y", stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert b"waiting for standard input" in process.stderr.readline()
    out, _ = process.communicate(b"late\n", timeout=30)
    assert out == b"echo: late\nx y\n"


def test_words_after_stats_stay_prompt(home: Home, fake: FakeDaemon) -> None:
    done = home.run("run", "--stats", "json or text?")
    assert done.stdout == b"echo: json or text?\n"
    lines = dict(line.split(":", 1) for line in done.stderr.decode().splitlines() if line)
    assert {name: value.strip() for name, value in lines.items()} == {
        "total duration": "2.125 s",
        "load duration": "1.0 ms",
        "prompt eval count": "10 token(s)",
        "prompt eval duration": "70.0 ms",
        "prompt eval rate": "142.86 tokens/s",
        "eval count": "5 token(s)",
        "eval duration": "50.0 ms",
        "eval rate": "100.00 tokens/s",
        "ttft": "81.5 ms",
        "cached prompt tokens": "3 token(s)",
        "queue wait": "1.5 ms",
        "context used": "15 of 8192 tokens",
    }


def test_stats_as_json(home: Home, fake: FakeDaemon) -> None:
    done = home.run("run", "--stats=json", "x y")
    figures = json.loads(done.stderr)
    assert figures["timings"]["ttft_ms"] == 81.5
    assert (figures["context_used"], figures["context_limit"]) == (15, 8192)
    assert done.stdout == b"echo: x y\n"


def test_the_context_told_is_that_of_the_request(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["x"], done_reason="length")
    done = home.run("run", "x y", "--ctx", "15", "--stats")
    assert b"the context is full; --ctx makes it larger" in done.stderr
    assert b"15 of 15 tokens" in done.stderr
    figures = json.loads(home.run("run", "short one", "--ctx", "512", "--stats=json").stderr)
    assert figures["context_limit"] == 512


def test_a_model_that_is_not_here_is_pulled_first(home: Home, fake: FakeDaemon) -> None:
    fake.models.clear()
    fake.pullable.append(MODEL)
    done = home.run("run", "Why is it?")
    assert (done.returncode, done.stdout) == (0, b"echo: Why is it?\n")
    assert b"fetching it" in done.stderr
    assert fake.models == [MODEL]


def test_an_unknown_model(home: Home, fake: FakeDaemon) -> None:
    done = home.run("run", "no:such", "Why?")
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.decode().endswith(f"error: no model no:such\nhint: did you mean {MODEL}?\n")


@pytest.mark.parametrize(
    ("code", "number"),
    [("out_of_memory", 5), ("context_length_exceeded", 6), ("network_error", 7), ("worker_died", 1), ("device_unavailable", 8)],
)
def test_refusals_have_their_exit_code(home: Home, fake: FakeDaemon, code: str, number: int) -> None:
    fake.replies["x y"] = Reply(status=400, error={"error": "sorry", "code": code, "hint": "less"})
    done = home.run("run", "x y")
    assert (done.returncode, done.stdout, done.stderr) == (number, b"", b"error: sorry\nhint: less\n")


def test_a_failure_in_mid_answer_keeps_what_came(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["part"], error={"error": "it died", "code": "worker_died"})
    done = home.run("run", "x y")
    assert (done.returncode, done.stdout) == (1, b"part")
    assert b"error: it died" in done.stderr


def test_an_answer_without_an_end_is_no_success(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["part"], cut=True)
    assert home.run("run", "x y").returncode == 4


def test_a_full_context_is_said(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["part"], done_reason="length", prompt_tokens=8187)
    assert b"the context is full" in home.run("run", "x y").stderr
    assert b"the context is full" in home.run("run", "x y", "--max-tokens", "9").stderr


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_another_limit_is_not_called_a_full_context(home: Home, fake: FakeDaemon, reason: str) -> None:
    fake.replies["x y"] = Reply(["part"], done_reason=reason, prompt_tokens=8186 if reason == "length" else 8187)
    assert home.run("run", "x y").stderr == b""


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        (["why", "--raw", "is", "--temp=0", "it"], "why is it"),
        (["--raw", "--", "--stats", "--help"], "--stats --help"),
        (["--raw", "-o", "stop=a", "-ostop=b", "-", "now"], "piped now"),
        (["--raw", "--system=", "--stdin", "never", "a b"], "a b"),
    ],
)
def test_options_and_words_mix(home: Home, fake: FakeDaemon, arguments: list[str], prompt: str) -> None:
    done = home.run("run", *arguments, stdin=b"piped" if "-" in arguments else None)
    assert done.returncode == 0, done.stderr
    assert [body["prompt"] for body in fake.bodies("/api/generate")] == [prompt]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_cancel_the_request(home: Home, fake: FakeDaemon, number: int, code: int) -> None:
    fake.replies["x y"] = Reply(["word "] * 1000, pause_s=0.02)
    process = home.popen("run", "x y")
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word "
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert error == b""
    assert set(out.split()) <= {b"word"}
    assert fake.left.wait(5)


def test_a_reader_that_leaves_is_no_error(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["line\n"] * 1000, pause_s=0.005)
    script = f"{sys.executable} -m cavectl run 'x y' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=home.environ, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert done.stdout == b"line\n0\n"
    assert done.stderr == b""
    assert fake.left.wait(5)


LOCALES = [{"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}]


@pytest.mark.parametrize("environ", LOCALES)
def test_no_locale_stops_the_output(home: Home, fake: FakeDaemon, environ: dict[str, str]) -> None:
    fake.replies["Ж?"] = Reply(["é🙂模型"])
    fake.models.append("模型:é")
    assert home.run("run", "-m", "模型:é", "Ж?", environ=environ).stdout.decode() == "é🙂模型\n"
    assert "模型:é" in home.run("list", environ=environ).stdout.decode()
    done = home.run("show", "нет:такой", environ=environ)
    assert "нет:такой" in done.stderr.decode()


def test_closed_streams(home: Home, fake: FakeDaemon) -> None:
    for redirection in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        script = f"{sys.executable} -m cavectl run 'x y' {redirection}; echo $? >{home.path}/code"
        subprocess.run(["bash", "-c", script], env=home.environ, cwd=ROOT, capture_output=True, timeout=60, check=False)
        assert (home.path / "code").read_text() == "0\n", redirection


def test_a_full_disk_is_an_error(home: Home, fake: FakeDaemon) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    script = f"{sys.executable} -m cavectl run 'x y' >/dev/full"
    done = subprocess.run(["bash", "-c", script], env=home.environ, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"error: " in done.stderr
    assert b"Traceback" not in done.stderr
