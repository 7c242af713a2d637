"""The chat in a pseudo-terminal, against a fake daemon: what a person types and sees."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import FileHistory

from cavectl.editor import is_open, trim_history, unfenced
from tests.cavectl.conftest import Home
from tests.cavectl.fake_daemon import MODEL, FakeDaemon, Reply
from tests.cavectl.terminal import Terminal, terminal

PROMPT = ">>> "


@contextmanager
def chat(home: Home, *arguments: str, **environ: str) -> Iterator[Terminal]:
    with terminal(home.environ | environ, "run", *arguments) as screen:
        screen.expect(PROMPT)
        yield screen


def say(screen: Terminal, text: str) -> None:
    screen.send(text + "\r")


def sent(fake: FakeDaemon) -> list[list[tuple[str, str]]]:
    """The messages of each request."""
    return [[(m["role"], m["content"]) for m in body["messages"]] for body in fake.bodies("/api/chat")]


def test_a_conversation(home: Home, fake: FakeDaemon) -> None:
    with chat(home) as screen:
        assert "Send a message (/? for help)" in screen.text
        say(screen, "hello")
        screen.expect("echo: hello\n")
        screen.expect(PROMPT)
        say(screen, "more é")
        screen.expect("echo: more é\n")
        screen.expect(PROMPT)
        say(screen, "/bye")
        assert screen.wait() == 0
    first = [("user", "hello")]
    assert sent(fake) == [first, [*first, ("assistant", "echo: hello"), ("user", "more é")]]


def test_ctrl_d_leaves(home: Home, fake: FakeDaemon) -> None:
    with chat(home, MODEL) as screen:
        screen.send(b"\x04")
        assert screen.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_session(home: Home, fake: FakeDaemon) -> None:
    fake.replies["count"] = Reply(["one ", "two "] + ["more "] * 500, pause_s=0.05)
    with chat(home) as screen:
        say(screen, "count")
        screen.expect("one two more")
        screen.interrupt()
        screen.expect("stopped")
        assert fake.left.wait(5)
        screen.expect(PROMPT)
        screen.interrupt()
        screen.expect("Ctrl-D or /bye leaves")
        screen.expect(PROMPT)
        say(screen, "next")
        screen.expect("echo: next")
        say(screen, "/bye")
        assert screen.wait() == 0
    (_, kept, _) = sent(fake)[1]
    assert kept[0] == "assistant"
    assert kept[1].startswith("one two more")
    assert "Traceback" not in screen.text


@pytest.mark.parametrize(
    "failure",
    [
        Reply(status=503, error={"error": "no room", "code": "queue_full"}),
        Reply(["pa"], error={"error": "no room", "code": "worker_died"}),
    ],
)
def test_a_failed_request_keeps_the_chat(home: Home, fake: FakeDaemon, failure: Reply) -> None:
    fake.replies["try"] = failure
    with chat(home) as screen:
        say(screen, "first")
        screen.expect("echo: first")
        say(screen, "try")
        screen.expect("error: no room")
        screen.expect("/retry sends your message again")
        screen.expect(PROMPT)
        fake.replies["try"] = Reply(["better"])
        say(screen, "/retry")
        screen.expect("better")
        screen.expect(PROMPT)
        say(screen, "/retry")
        screen.expect("no message failed")
        say(screen, "/bye")
        assert screen.wait() == 0
    before = [("user", "first"), ("assistant", "echo: first"), ("user", "try")]
    assert sent(fake)[1:] == [before, before]


def test_a_paste_of_200_lines_is_one_message(home: Home, fake: FakeDaemon) -> None:
    lines = [f"line {n} é" for n in range(200)]
    with chat(home) as screen:
        screen.send("\x1b[200~" + "\r".join(lines) + "\x1b[201~")
        screen.expect("line 199")
        screen.send("\r")
        screen.expect("echo: line 0 é\nline 1 é")
        screen.expect("line 199 é\n")
        say(screen, "/bye")
        assert screen.wait() == 0
    assert sent(fake) == [[("user", "\n".join(lines))]]


def test_lines_in_triple_quotes_and_after_ctrl_j(home: Home, fake: FakeDaemon) -> None:
    with chat(home) as screen:
        screen.send('"""one\rtwo\r\rthree"""\r')
        screen.expect("... ")
        screen.expect("echo: one\ntwo\n\nthree")
        screen.expect(PROMPT)
        screen.send("a\nb\r")
        screen.expect("echo: a\nb")
        say(screen, "/bye")
        assert screen.wait() == 0
    assert [messages[-1][1] for messages in sent(fake)] == ["one\ntwo\n\nthree", "a\nb"]


def test_history_is_private_and_keeps_entries_whole(home: Home, fake: FakeDaemon) -> None:
    with chat(home) as screen:
        screen.send("a\nb\r")
        screen.expect("echo: a\nb")
        say(screen, "/set nohistory")
        screen.expect("set")
        say(screen, "secret")
        screen.expect("echo: secret")
        say(screen, "/bye")
        screen.wait()
    file = home.data_dir / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "secret" not in file.read_text()
    with chat(home) as screen:
        screen.send("\x1b[A\x1b[A\r")  # past "/set nohistory"
        screen.expect("echo: a\nb")
        say(screen, "/bye")
        screen.wait()
    assert sent(fake)[-1] == [("user", "a\nb")]


def test_history_keeps_its_last_entries(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = FileHistory(str(path))
    entries = ["first", "a\n# b\n\n+c\n", "é\r\n# d", "last"]
    for entry in entries:
        history.store_string(entry)
    whole = path.read_bytes()
    trim_history(path, 4)
    assert path.read_bytes() == whole
    trim_history(path, 3)
    assert list(FileHistory(str(path)).load_history_strings()) == entries[:0:-1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_slash_commands(home: Home, fake: FakeDaemon) -> None:
    fake.models.append("other:latest")

    def enter(command: str, answer: str) -> None:
        say(screen, command)
        screen.expect(answer)
        screen.expect(PROMPT)

    with chat(home) as screen:
        enter("/?", "Ctrl-C stops an answer")
        enter("/nonsense", "no command /nonsense")
        enter("/set parameter temperature 0.5", "set")
        enter("/set parameter temperature warm", "temperature is a number")
        enter("/set parameter temperature -5", "from 0 to 100, not -5.0")
        enter("/set parameter temperature nan", "from 0 to 100, not nan")
        enter("/set parameter temprature 1", "did you mean temperature")
        enter("/set", "/set parameter NAME VALUE")
        enter('/set system "be brief"', "set")
        enter("/show system", "be brief")
        enter("/show parameters", "temperature  0.5")
        enter("/show info", "llama")
        enter("/show license", "Apache-2.0")
        enter("/show", "/show info, license")
        enter("/set verbose", "set")
        enter("hello", "context used:")
        enter("/set quiet", "set")
        enter("/load no:such", "no model no:such")
        enter("/load other:latest", "now with other:latest")
        enter("again", "echo: again")
        enter("/clear", "cleared")
        enter("fresh", "echo: fresh")
        say(screen, "/exit")
        assert screen.wait() == 0
    system = ("system", "be brief")
    assert sent(fake) == [
        [system, ("user", "hello")],
        [system, ("user", "hello"), ("assistant", "echo: hello"), ("user", "again")],
        [system, ("user", "fresh")],
    ]
    bodies: list[Any] = fake.bodies("/api/chat")
    assert [body["model"] for body in bodies] == [MODEL, "other:latest", "other:latest"]
    assert all(body["options"] == {"temperature": 0.5} for body in bodies)


@pytest.mark.parametrize(("arguments", "extra"), [((), {}), (("--ctx", "512"), {"ctx": 512})])
def test_the_model_loads_while_the_person_types(
    home: Home, fake: FakeDaemon, arguments: tuple[str, ...], extra: dict[str, int]
) -> None:
    with chat(home, *arguments) as screen:
        say(screen, "hi")
        screen.expect("echo: hi")
        say(screen, "/bye")
        screen.wait()
    assert fake.bodies("/api/generate") == [{"model": MODEL, "stream": False, **extra}]


def test_a_model_cannot_command_the_terminal(home: Home, fake: FakeDaemon) -> None:
    fake.replies["evil"] = Reply(["a\x1b]0;title\x07b", "\x9b2J", "c\r"])
    with chat(home) as screen:
        say(screen, "evil")
        screen.expect("2Jc")
        screen.expect(PROMPT)
        say(screen, "/bye")
        screen.wait()
    assert b"\x1b]0;title" not in screen.raw
    assert b"\x9b" not in screen.raw.replace("\ufffd".encode(), b"")


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"LC_ALL": "C"}])
def test_plain_terminals(home: Home, fake: FakeDaemon, environ: dict[str, str]) -> None:
    with chat(home, **environ) as screen:
        say(screen, "Ж")
        screen.expect("echo: Ж")
        say(screen, "/nonsense")
        screen.expect("no command")
        say(screen, "/bye")
        assert screen.wait() == 0
    assert b"\x1b[1;31m" not in screen.raw or "LC_ALL" in environ


def test_a_missing_model_is_fetched_with_a_bar(home: Home, fake: FakeDaemon) -> None:
    fake.models.clear()
    fake.pullable.append(MODEL)
    with chat(home) as screen:
        assert "pulling m.gguf" in screen.text
        assert "1.0/1.0 kB" in screen.text
        say(screen, "hi")
        screen.expect("echo: hi")
        say(screen, "/bye")
        assert screen.wait() == 0


def test_a_slow_start_is_explained_and_taken_back(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["", "done"], pause_s=1.5)
    with terminal(home.environ, "run", "x y") as screen:
        screen.expect(f"waiting for {MODEL} ...")
        screen.expect("done")
        assert screen.wait() == 0
    assert b"...\r\x1b[Kdone" in screen.raw


def test_ctrl_c_in_a_single_answer(home: Home, fake: FakeDaemon) -> None:
    fake.replies["x y"] = Reply(["word "] * 500, pause_s=0.05)
    with terminal(home.environ, "run", "x y") as screen:
        screen.expect("word word")
        screen.interrupt()
        assert screen.wait() == 130
    assert "Traceback" not in screen.text


@pytest.mark.parametrize(
    ("text", "opened", "message"),
    [
        ('"""a', True, '"""a'),
        ('"""a"""', False, "a"),
        ('"""\na\n"""', False, "a"),
        ("a", False, "a"),
        ('say """x"""', False, 'say """x"""'),
        ('""""""', False, ""),
        ('"""', True, '"""'),
        (" indented\n", False, " indented\n"),
    ],
)
def test_fences(text: str, opened: bool, message: str) -> None:
    assert is_open(text) is opened
    assert unfenced(text) == message
