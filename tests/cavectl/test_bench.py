"""`cavectl bench` as a person runs it, on a tiny model: one document, one table, and errors with their exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cavectl.commands import bench
from daemon.store import Store
from engine.bench import notation
from tests.cavectl.conftest import Home
from tests.fixtures.tiny_rand import tiny_rand

TESTS = "pp8,tg4,tg4x2"


@pytest.fixture
def home(home: Home, test_cache: Path) -> Home:
    """With the native library where other tests have built it; torch's warnings are not this command's."""
    home.environ |= {"CAVECTL_TEST_CACHE": str(test_cache), "PYTHONWARNINGS": ""}
    return home


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rand(context_tokens=256).save(tmp_path_factory.mktemp("bench") / "tiny")


def test_json_is_the_last_line(home: Home, tiny: Path) -> None:
    done = home.run("bench", str(tiny), "--tests", TESTS, "--reps", "2", "--threads", "1", "--isa", "scalar", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["benchmark"], document["schema"], list(document["tests"])) == ("speed", 1, TESTS.split(","))
    assert all(result["n"] == 2 and result["min"] > 0 for result in document["tests"].values())
    assert (document["conditions"]["repeats"], document["conditions"]["model"]["threads"]) == (2, 1)
    assert document["conditions"]["model"]["isa"] == ("scalar" if document["conditions"]["model"]["backend"] == "cpu" else "")
    said = done.stderr.decode()
    assert "pp8: round 1 of 2" in said and "TOKENS/S" in said


def test_without_json_it_is_a_table(home: Home, tiny: Path) -> None:
    done = home.run("bench", str(tiny), "--tests", TESTS, "--reps", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["TEST", "TOKENS/S", "LEAST", "MOST", "OF", "THE", "FLOOR"]
    assert [line.split()[0] for line in lines[1:4]] == TESTS.split(",")
    assert "GB/s" in lines[-1] and "MB resident" in lines[-2]
    assert "TOKENS/S" not in done.stderr.decode()
    assert not (home.data_dir / "logs").exists(), "no daemon was needed"


def test_a_model_of_the_store(home: Home, tiny: Path) -> None:
    """Found without a daemon, with the packed weights that it has there."""
    record = asyncio.run(Store(home.data_dir).import_path(tiny, "mine"))
    record.packed.unlink(missing_ok=True)
    done = home.run("bench", "mine", "--tests", "tg2", "--reps", "1", "--json")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout.splitlines()[-1])["conditions"]["model"]
    assert model["architecture"] == "llama" and record.packed.exists() == (model["backend"] == "cpu")
    assert not (home.data_dir / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("TINY", "--tests", "pp8,quick"), 2, "no speed test is called 'quick'"),
        (("TINY", "--tests", ""), 2, "no speed test is named"),
        (("TINY", "--tests", "tg8@999"), 2, "needs a context of 1011 tokens, the model holds 256"),
        (("TINY", "--reps", "0"), 2, "0 is not in the range"),
        (("TINY", "--kv-dtype", "int3"), 2, "'int3' is not one of"),
        (("TINY", "--isa", "mmx"), 2, "no instruction set mmx"),
        (("nobody:1",), 3, "there is no model nobody:1"),
        (("/no/such/file.gguf",), 3, 'file.gguf" is not imported'),
        (("",), 2, "the model's name is empty"),
    ],
)
def test_what_cannot_be_measured(home: Home, tiny: Path, arguments: tuple[str, ...], status: int, said: str) -> None:
    words = [str(tiny) if word == "TINY" else word for word in arguments]
    done = home.run("bench", *words, "--json")
    assert (done.returncode, done.stdout) == (status, b"")
    assert said in done.stderr.decode() and "Traceback" not in done.stderr.decode()


def test_another_machine_is_not_measured(home: Home, tiny: Path) -> None:
    done = home.run("--url", "http://127.0.0.1:1", "bench", str(tiny))
    assert done.returncode == 2 and b"leave --url out" in done.stderr


def test_the_default_is_that_of_the_engine() -> None:
    assert bench._TESTS == notation.DEFAULT_TESTS
