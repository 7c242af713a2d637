"""Speed tests on a clock that is known, then as a child process runs them on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.bench import speed
from engine.bench.notation import parse_test, parse_tests
from engine.bench.speed import Document
from tests.engine.bench.virtual_subject import STEP_MS, TOKEN_MS, said, virtual_subject
from tests.fixtures.tiny_rand import tiny_rand


def ms(tokens: int) -> float:
    """How long a step of so many tokens takes on the clock of virtual_subject."""
    return STEP_MS + TOKEN_MS * tokens


@pytest.mark.parametrize("tokens", [1, 40, 512])
def test_a_prefill_is_its_one_step(tokens: int) -> None:
    value = speed.run_test(virtual_subject(), parse_test(f"pp{tokens}"), (0, 0))
    assert value == pytest.approx(tokens / ms(tokens) * 1e3)


def test_a_long_prefill_is_all_of_its_steps() -> None:
    value = speed.run_test(virtual_subject(), parse_test("pp1000"), (0, 0))
    assert value == pytest.approx(1000 / (ms(512) + ms(488)) * 1e3)


@pytest.mark.parametrize("name", ["tg4", "tg4@700"])
def test_a_decode_counts_no_prefill(name: str) -> None:
    assert speed.run_test(virtual_subject(), parse_test(name), (0, 0)) == pytest.approx(1e3 / ms(1))


@pytest.mark.parametrize("name", ["tg5x8", "tg5@200x8", "tg5@300x8"])
def test_sequences_are_counted_together(name: str) -> None:
    """The last one's prompts are more than a step takes: what decodes meanwhile is not counted."""
    assert speed.run_test(virtual_subject(), parse_test(name), (0, 0)) == pytest.approx(8 * 1e3 / ms(8))


def test_prompts_share_nothing_and_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    add = speed.Drive.add

    def noted(self: speed.Drive, prompt: list[int], max_tokens: int) -> Any:
        prompts.append(prompt)
        return add(self, prompt, max_tokens)

    monkeypatch.setattr(speed.Drive, "add", noted)
    for _ in range(2):
        speed.run_tests(virtual_subject(), parse_tests("pp9,tg2@9x3"), 2, 7, said)
    half = len(prompts) // 2
    assert prompts[:half] == prompts[half:]
    assert len({tuple(prompt) for prompt in prompts[:half]}) == half


def test_rounds_take_turns() -> None:
    lines: list[str] = []
    figures = speed.run_tests(virtual_subject(), parse_tests("pp4,tg2"), 2, 0, lines.append)
    assert [line.split(":")[0] for line in lines] == ["pp4", "tg2", "tg2", "pp4"]
    assert {name: len(values) for name, values in figures.items()} == {"pp4": 2, "tg2": 2}


def test_medians() -> None:
    result = speed._result([3.0, 1.0, 2.5])
    assert (result.median, result.min, result.max, result.n, result.unit) == (2.5, 1.0, 3.0, 3, "tokens/s")


@pytest.mark.parametrize("name", ["pp512", "tg3", "tg3@60", "tg3@9x4", "tg4@3000x8", "tg4@128x32"])
def test_a_test_ends_within_the_room_it_asks_for(name: str) -> None:
    test = parse_test(name)
    assert speed.run_test(virtual_subject(context_tokens=speed.room_tokens(test), pages=4000), test, (0, 0)) > 0


# --- the child process ------------------------------------------------------------------------------------------------------------


def child(*arguments: str | Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "engine.bench.speed", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    return done, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rand(context_tokens=512).save(tmp_path_factory.mktemp("speed") / "tiny")


def test_the_document(tiny: Path) -> None:
    tests = "pp8,tg4,tg4@40,tg4x3"
    done, plain = child(tiny, "--tests", tests, "--reps", 3, "--threads", 1, "--seed", 5)
    assert done.returncode == 0, done.stderr
    document = msgspec.json.decode(done.stdout, type=Document)
    assert (plain["benchmark"], plain["schema"]) == ("speed", 1)
    assert list(document.tests) == tests.split(",")
    for result in plain["tests"].values():
        assert set(result) == {"median", "min", "max", "n", "unit"}
        assert 0 < result["min"] <= result["median"] <= result["max"] and (result["n"], result["unit"]) == (3, "tokens/s")
    under = document.conditions
    assert under.model is not None and (under.model.file, under.model.threads, under.repeats, under.seed) == ("tiny", 1, 3, 5)
    assert set(document.floor.tests) == {"tg4", "tg4@40", "tg4x3"} and document.floor.bandwidth is not None
    assert document.resident_bytes > 1 << 20
    assert "tg4@40: round 3 of 3" in done.stderr and str(tiny.parent) not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said_of_it"),
    [
        (("--tests", "pp8,fast"), "invalid_request", "no speed test is called 'fast'"),
        (("--tests", "tg8@4000"), "invalid_request", "needs a context of 4012 tokens, the model holds 512"),
        (("--backend", "cuda"), "device_unavailable", "cuda"),
    ],
)
def test_errors_are_one_document_too(tiny: Path, arguments: tuple[str, ...], code: str, said_of_it: str) -> None:
    done, answer = child(tiny, *arguments)
    assert done.returncode == 1 and answer["error"]["code"] == code
    assert said_of_it in answer["error"]["message"] and "Traceback" not in done.stderr


def test_no_such_file(tmp_path: Path) -> None:
    done, answer = child(tmp_path / "none.gguf")
    assert done.returncode == 1 and answer["error"]["message"]
