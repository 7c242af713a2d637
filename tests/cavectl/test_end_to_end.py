"""Commands through the real daemon: a tiny model with a scripted engine, and the default model once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cavectl.conftest import ROOT, Home
from tests.cavectl.real_daemon import MODEL, real_home, recorded, script, until, worker_events
from tests.cavectl.terminal import terminal
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_rand(context_tokens=256).save(tmp_path_factory.mktemp("Ж é 模型"))
    write_tiny_tok(folder)
    return folder


@pytest.fixture(scope="module")
def real(model_folder: Path) -> Iterator[Home]:
    """A home with the tiny model imported, its daemon started by that import."""
    with real_home() as home:
        done = home.run("import", str(model_folder), "--name", "tiny/rand", environ={"LC_ALL": "C"})
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith(f"success\nimported as {MODEL}\n".encode())
        yield home


def test_the_model_is_there(real: Home) -> None:
    (model,) = json.loads(real.run("list", "--json").stdout)["models"]
    assert model["name"] == MODEL
    assert MODEL in real.run("list").stdout.decode()
    assert "context length    256" in real.run("show", MODEL).stdout.decode()
    assert real.run("__complete", "models").stdout == f"smollm2:135m\n{MODEL}\n".encode()


def test_piped_output_is_the_models_text(real: Home) -> None:
    text = "é🙂 two\nlines\t\x1b[1m end"
    script(real, text.encode())
    out = real.path / "out"
    command = [sys.executable, "-m", "cavectl", "run", MODEL, "hi"]
    with out.open("wb") as file:
        subprocess.run(command, env=real.environ, cwd=ROOT, stdout=file, check=True, timeout=100)
    assert out.read_bytes() == text.encode() + b"\n"


def test_stats_and_ps(real: Home) -> None:
    script(real, b"abc", pages_cached=4, pages_pinned=3, chunk_tokens=96)
    figures = json.loads(real.run("run", MODEL, "hi", "--stats=json").stderr)
    assert figures["eval_count"] == 3
    assert figures["context_limit"] == 256
    assert figures["context_used"] == figures["prompt_eval_count"] + 3
    assert figures["timings"]["ttft_ms"] >= 0
    lines = real.run("run", MODEL, "hi", "--stats").stderr.decode()
    for name in ("total duration", "load duration", "prompt eval rate", "eval rate", "ttft", "cached prompt tokens", "queue wait"):
        assert f"{name}:" in lines
    (row,) = real.run("ps").stdout.decode().splitlines()[1:]
    assert row.split()[0] == MODEL
    assert "scripted" in row and "0+7/64" in row
    [shown] = json.loads(real.run("ps", "--json").stdout)["models"]
    assert shown["pages"] == {"total": 64, "used": 0, "cached": 4, "pinned": 3} and shown["queue"] == {"running": 0, "waiting": 0}
    assert shown["chunk_tokens"] == 96 and shown["preemptions"] == shown["accounting_errors"] == shown["hit_tokens"] == 0
    assert MODEL in real.run("daemon", "status").stdout.decode()
    assert real.run("stop", MODEL).returncode == 0
    assert json.loads(real.run("ps", "--json").stdout) == {"models": []}


def test_options_reach_the_engine(real: Home) -> None:
    script(real, b"abc")
    done = real.run("run", MODEL, "hi", "--temp", "0.5", "--seed", "7", "--max-tokens", "2", "-o", "top_k=3", "-o", "stop=zz")
    assert done.returncode == 0, done.stderr
    (added,) = worker_events(real, "add")
    sampling = added["request"]["sampling"]
    assert (sampling["temperature"], sampling["seed"], sampling["top_k"]) == (0.5, 7, 3)
    assert added["request"]["max_tokens"] == 2


def test_raw_sends_no_template(real: Home) -> None:
    script(real, b"abc")
    real.run("run", MODEL, "hi")
    real.run("run", MODEL, "hi", "--raw")
    with_template, without = (len(event["request"]["prompt"]) for event in worker_events(real, "add"))
    assert (without, with_template > 5) == (2, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_engine(real: Home, number: int, code: int) -> None:
    script(real, b"abcdefgh", repeat=True, every_ms=30)
    process = real.popen("run", MODEL, "hi")
    assert process.stdout is not None
    assert process.stdout.read(3) == b"abc"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, b"")
    until(lambda: worker_events(real, "abort"))


def test_head_ends_the_answer(real: Home) -> None:
    script(real, b"line\n", repeat=True, every_ms=5)
    pipe = f"{sys.executable} -m cavectl run {MODEL} hi | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], env=real.environ, cwd=ROOT, capture_output=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == (b"line\n0\n", b"")
    until(lambda: worker_events(real, "abort"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("run", MODEL, "word " * 400), 6, "the context holds 256"),
        (("run", "tiny/rant", "hi"), 3, "tiny/rand"),
        (("show", "nothing:here"), 3, "nothing:here"),
        (("run", MODEL, "hi", "--temp", "-1"), 2, "--temp"),
        (("import", "{home}"), 1, ""),
    ],
)
def test_refusals(real: Home, arguments: tuple[str, ...], code: int, said: str) -> None:
    script(real, b"abc")
    done = real.run(*(argument.replace("{home}", str(real.path / "home")) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    text = done.stderr.decode()
    assert "error: " in text
    assert said in text
    assert "Traceback" not in text
    assert real.run("run", MODEL, "hi").stdout == b"abc\n"


def test_a_worker_that_dies_is_an_error_and_the_next_call_works(real: Home) -> None:
    script(real, b"abcdefgh", exit_at=3)
    done = real.run("run", MODEL, "hi")
    assert done.returncode == 1
    assert b"error: " in done.stderr
    script(real, b"abc")
    assert real.run("run", MODEL, "hi").stdout == b"abc\n"


def test_a_chat_in_a_terminal(real: Home) -> None:
    script(real, b"one two three ", repeat=True, every_ms=30)
    with terminal(real.environ, "run", MODEL) as screen:
        screen.expect(">>> ")
        screen.send("count\r")
        screen.expect("one two three one")
        screen.interrupt()
        screen.expect("stopped")
        until(lambda: worker_events(real, "abort"))
        screen.send("\x1b[200~" + "\r".join(f"l{n}" for n in range(20)) + "\x1b[201~\r")
        screen.expect("one two three one")
        screen.interrupt()
        screen.expect("stopped")
        screen.send("word " * 400 + "\r")
        screen.expect("error: the prompt has")
        screen.expect(">>> ")
        screen.send("/bye\r")
        assert screen.wait() == 0
    assert "Traceback" not in screen.text


def test_a_path_is_run_where_it_is(real: Home, real_model_path: Path) -> None:
    """Taken in on first use and found again on the second: the file is neither copied nor hashed twice."""
    script(real, b"any text")
    ask = ("run", str(real_model_path), "hi", "--max-tokens", "2")
    first, second = real.run(*ask), real.run(*ask)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert b"hashing" in first.stderr
    assert second.stderr == b""
    assert str(real_model_path) in worker_events(real, "load")[0]["path"]


def test_a_daemon_killed_in_mid_answer(real: Home) -> None:
    """Last in this file: it takes the daemon away."""
    script(real, b"abcdefgh", repeat=True, every_ms=30)
    process = real.popen("run", MODEL, "hi")
    assert process.stdout is not None
    assert process.stdout.read(3) == b"abc"
    subprocess.run(["kill", "-9", str(recorded(real)["pid"])], check=True)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 4
    assert b"closed the connection" in error


def test_the_real_model_answers(real_model_path: Path) -> None:
    """The default model on the backend that this machine has, through everything. (Of France it is of two minds: a near tie.)"""
    with real_home(CAVECTL_WORKER_COMMAND="", CAVECTL_CONTEXT_TOKENS="512") as home:
        ask = ("run", str(real_model_path), "What is the capital of Germany?", "--temp", "0", "--max-tokens", "12")
        first, second = home.run(*ask), home.run(*ask)
        assert first.returncode == 0, first.stderr
        assert b"Berlin" in first.stdout
        assert second.stdout == first.stdout
        assert home.run("daemon", "stop").returncode == 0
