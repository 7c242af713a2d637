"""Commands as a person runs them, against a fake daemon: what is on stdout, what is on stderr, and the exit code."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from cavectl.app import COMMANDS, GROUPS, command, help_text
from tests.cavectl.conftest import Home
from tests.cavectl.fake_daemon import MODEL, FakeDaemon


def test_list(home: Home, fake: FakeDaemon) -> None:
    done = home.run("list")
    assert done.returncode == 0
    assert done.stderr == b""
    header, row = done.stdout.decode().splitlines()
    assert header.split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert row.startswith(f"{MODEL}  abababababab  98 MB  ")
    assert (home.data_dir / "model-names").read_text() == f"{MODEL}\n"


@pytest.mark.parametrize("arguments", [("list",), ("ls",), ("show", MODEL), ("ps",), ("daemon", "status")])
def test_json_is_one_document(home: Home, fake: FakeDaemon, arguments: tuple[str, ...]) -> None:
    done = home.run(*arguments, "--json")
    assert done.returncode == 0
    assert isinstance(json.loads(done.stdout), dict)


def test_show(home: Home, fake: FakeDaemon) -> None:
    text = home.run("show", MODEL).stdout.decode()
    assert "llama" in text
    assert "8192" in text
    assert "Apache-2.0" in text


def test_ps(home: Home, fake: FakeDaemon) -> None:
    row = home.run("ps").stdout.decode().splitlines()[1]
    assert row.split() == [MODEL, "98", "MB", "reference", "8192", "12+30/512", "0", "ready", "forever"]
    assert json.loads(home.run("ps", "--json").stdout)["models"][0]["pages"]["pinned"] == 10


def test_what_needs_no_daemon_starts_none(home: Home) -> None:
    done = home.run("ps", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"models": []})
    assert home.run("stop", MODEL).returncode == 0
    assert home.run("daemon", "stop").returncode == 0
    status = home.run("daemon", "status", "--json")
    assert (status.returncode, json.loads(status.stdout)["running"]) == (4, False)
    assert not (home.data_dir / "logs").exists()


def test_stop_asks_to_unload(home: Home, fake: FakeDaemon) -> None:
    done = home.run("stop", MODEL)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (0, b"", f"stopped {MODEL}\n")
    assert fake.bodies("/api/generate") == [{"model": MODEL, "keep_alive": 0, "stream": False}]


def test_stop_of_what_is_not_in_memory(home: Home, fake: FakeDaemon) -> None:
    fake.idle.append(MODEL)
    done = home.run("stop", MODEL)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (0, b"", f"{MODEL} was not loaded\n")


def test_rm_goes_on_after_a_wrong_name(home: Home, fake: FakeDaemon) -> None:
    fake.models.append("b:c")
    done = home.run("rm", MODEL, "no:such", "b:c")
    assert done.returncode == 3
    assert fake.models == []
    assert done.stderr.decode() == f"removed {MODEL}\nremoved b:c\nerror: no model no:such\nhint: did you mean {MODEL}?\n"


def test_pull_shows_stages_as_lines(home: Home, fake: FakeDaemon) -> None:
    fake.pullable.append("a:b")
    done = home.run("pull", "a:b")
    assert done.returncode == 0
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "pulling manifest"
    assert lines[1] == "pulling m.gguf: 0% of 1.0 KB"
    assert "pulling m.gguf: 100% of 1.0 KB" in lines
    assert len(lines) < 20
    assert lines[-1] == "success"
    assert "a:b" in (home.data_dir / "model-names").read_text()


def test_pull_json_is_the_events(home: Home, fake: FakeDaemon) -> None:
    fake.pullable.append("a:b")
    done = home.run("pull", "a:b", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0] == {"status": "pulling manifest"}
    assert events[-1] == {"status": "success"}
    assert done.stderr == b""


def test_an_interrupted_pull_says_what_it_leaves(home: Home, fake: FakeDaemon) -> None:
    fake.pullable.append("a:b")
    fake.pull_pause_s = 0.2
    process = home.popen("pull", "a:b")
    assert process.stderr is not None
    first = process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert first == b"pulling manifest\n"
    assert process.returncode == 130
    assert b"cavectl pull a:b goes on" in rest
    assert b"Traceback" not in rest
    assert fake.left.wait(5)


def test_verify(home: Home, fake: FakeDaemon) -> None:
    fake.models += ["b:1"]
    done = home.run("verify", MODEL, "b:1")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.decode().splitlines()[-1] == "b:1 is whole"
    fake.damaged.append(MODEL)
    done = home.run("verify", MODEL, "b:1", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "models": [
            {
                "model": MODEL,
                "error": f"{MODEL} is damaged: m.gguf",
                "code": "hash_mismatch",
                "hint": f"cavectl pull {MODEL} gets it again",
            },
            {"status": "success", "model": "b:1"},
        ]
    }
    assert f"error: {MODEL} is damaged: m.gguf".encode() in done.stderr
    assert home.run("verify", "nobody").returncode == 3


def test_import_sends_the_whole_path(home: Home, fake: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "Ж é 模型" / "m 1.gguf"
    path.parent.mkdir()
    path.touch()
    done = home.run("import", str(path), "--name", "mine", environ={"LANG": "C", "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    assert fake.bodies("/api/import") == [{"path": str(path), "name": "mine", "mode": "auto", "stream": True}]
    assert done.stdout == b"" and done.stderr.endswith(b"imported as mine\n")


def test_import_of_nothing(home: Home, fake: FakeDaemon) -> None:
    done = home.run("import", "/no/such/ж.gguf", environ={"LC_ALL": "C"})
    assert done.returncode == 3
    assert "no file or folder /no/such/ж.gguf" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lst",), "did you mean: cavectl list"),
        (("list", "--jsn"), "did you mean --json?"),
        (("show",), "missing argument 'MODEL'"),
        (("show", MODEL, "more"), "unexpected extra argument (more)"),
        (("list", "--json=yes"), "does not take a value"),
        (("run", "--seed"), "'--seed' requires an argument"),
        (("run", "--stats=xml", "a b"), "'xml' is not one of 'text', 'json'"),
        (("run", "-x", "a b"), "hint: cavectl run --help; after -- no word is an option"),
        (("daemon", "logs", "-n", "-1"), "-1 is not in the range"),
        (("daemon", "strat"), "did you mean: cavectl daemon start"),
        (("--bad", "list"), "no option --bad"),
        (("--url",), "--url needs a value"),
        (("run", "-o", "tempreature=1", "x y"), "did you mean temperature"),
        (("run", "--seed", "x", "a b"), "invalid value for '--seed': 'x' is not a valid integer"),
        (("run", "--temp", "nan", "a b"), "--temp is a number from 0 to 100, not nan"),
        (("run", "--temp", "-1", "a b"), "--temp is a number from 0 to 100, not -1.0"),
        (("run", "--seed", str(2**64), "a b"), "--seed is a whole number from"),
        (("run", "-o", "top_p=inf", "a b"), "top_p is a number from 0 to 1, not inf"),
        (("run", "--ctx", "-1", "a b"), "-1 is not in the range"),
        *(((name, ""), "the model's name is empty") for name in ("pull", "show", "rm", "stop", "verify")),
        (("run", "--raw", "--system", "s", "a b"), "--raw sends no system message"),
        (("run",), "the prompt is empty"),
        (("run", "--stdin", "maybe", "a b"), "--stdin"),
        (("--url", "http://127.0.0.1:1", "daemon", "stop"), "leave --url out"),
    ],
)
def test_wrong_use_is_exit_code_2(home: Home, fake: FakeDaemon, arguments: tuple[str, ...], said: str) -> None:
    done = home.run(*arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert said in done.stderr.decode()


def test_a_daemon_at_a_url_is_never_started(home: Home) -> None:
    done = home.run("--url", "http://127.0.0.1:9", "list")
    assert done.returncode == 4
    assert b"no daemon answers at http://127.0.0.1:9" in done.stderr
    assert not (home.data_dir / "logs").exists()


def test_the_url_may_come_from_the_environment(home: Home) -> None:
    fake = FakeDaemon()
    for port in fake.listen_tcp():
        done = home.run("list", environ={"CAVECTL_URL": f"127.0.0.1:{port}", "CAVECTL_API_KEY": "k"})
        assert done.returncode == 0
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer k"}


@pytest.mark.parametrize(("version", "said"), [("9.9.9", "is version 9.9.9"), (None, "is not a cavectl daemon")])
def test_another_version_is_not_used(home: Home, fake: FakeDaemon, version: str | None, said: str) -> None:
    fake.version = version
    done = home.run("list")
    assert done.returncode == 4
    assert said in done.stderr.decode()


def test_help_of_everything(home: Home) -> None:
    assert home.run("--help").stdout.decode() == help_text()
    done = home.run("daemon")
    assert (done.returncode, done.stdout.decode()) == (2, help_text("daemon"))
    for name in COMMANDS:
        done = home.run(*name.split(), "--help", environ={"COLUMNS": "400", "FORCE_COLOR": "1"})
        assert (done.returncode, done.stderr) == (0, b"")
        text = " ".join(done.stdout.decode().split())
        assert text.startswith(f"Usage: cavectl {name} [OPTIONS]")
        texts = [getattr(one, "help", None) for one in command(name).params]
        assert all(one and one in text for one in texts), name
        assert "\x1b" not in text


def test_the_table_says_what_the_commands_say() -> None:
    for name, entry in COMMANDS.items():
        assert entry.summary == (command(name).help or "").splitlines()[0], name
    assert set(GROUPS) == {name.split()[0] for name in COMMANDS if " " in name}


def test_a_wrong_setting_is_named(home: Home) -> None:
    done = home.run("list", environ={"CAVECTL_PORT": "many"})
    assert done.returncode == 2
    assert b"port" in done.stderr.lower()
