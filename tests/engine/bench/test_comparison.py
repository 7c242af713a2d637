"""The comparison with llama.cpp, the other side played by scripts: ratios, verdicts, and what is said of what is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.bench import comparison, comparison_parts, cpu, sides
from engine.bench.comparison import Row
from engine.bench.comparison_parts import Plan, collect
from engine.bench.sides import NotMeasured, Ours, Theirs
from engine.bench.timing import spread
from tests.engine.bench.virtual_subject import said
from tests.fixtures.tiny_rand import tiny_rand

THEIR_SPEED = 10.0
SCRIPT = f"""
import json, sys
names = sys.argv[sys.argv.index("--only") + 1].split(",")
print("noise")
print(json.dumps({{name: {{"median": {THEIR_SPEED}}} for name in names}}))
"""


@pytest.mark.parametrize(
    ("ratio", "bounds", "verdict"),
    [
        (1.8, {"least": 1.8}, "met"),
        (1.79, {"least": 1.8}, "MISSED"),
        (0.3, {"most": 0.3}, "met"),
        (0.31, {"most": 0.3}, "MISSED"),
        (5.0, {}, "no target"),
        (None, {"least": 1.0}, "not measured"),
    ],
)
def test_verdicts(ratio: float | None, bounds: dict[str, float], verdict: str) -> None:
    row = Row(work="w", ratio=None if ratio is None else spread([ratio]), **bounds)
    assert row.verdict == verdict


def test_a_bound_may_be_on_our_figure_alone() -> None:
    row = Row(work="w", ours=spread([0.9]), ratio=spread([7.0]), most=1.0, of="ours")
    assert row.verdict == "met" and "<= 1" in comparison.table([row], ()).text()


def test_a_row_may_ask_for_more_decimals() -> None:
    """Perplexities differ in the third."""
    row = Row(work="w", ours=spread([22.28347]), ratio=spread([1.00083]))
    assert "22.3 " in comparison.table([row], ()).text()
    exact = comparison.table([Row(work="w", ours=row.ours, ratio=row.ratio, decimals=4)], ()).text()
    assert "22.2835" in exact and "1.0008" in exact


def test_a_ratio_is_taken_within_its_round() -> None:
    assert comparison.ratios([10, 40], [5, 8]) == [2, 5]
    assert comparison.ratios([10, 40], [5]) == [2]


def test_sides_take_turns() -> None:
    asked: list[str] = []

    def side(name: str) -> Callable[[int], dict[str, float]]:
        def ask(number: int) -> dict[str, float]:
            asked.append(f"{name}{number}")
            return {"x": float(number)}

        return ask

    figures = collect({"a": side("a"), "b": side("b")}, 3, said)
    assert asked == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert figures["a"].values == figures["b"].values == {"x": [0.0, 1.0, 2.0]}


def test_a_side_that_fails_is_not_asked_again() -> None:
    asked: list[int] = []

    def broken(number: int) -> dict[str, float]:
        asked.append(number)
        raise NotMeasured("it is not here")

    figures = collect({"a": lambda _: {"x": 2.0}, "b": broken}, 3, said)
    row = comparison_parts.row("work", figures["a"], figures["b"], "x", least=1.0)
    assert asked == [0] and row.ours == spread([2.0] * 3) and row.ratio is None
    assert row.verdict == "not measured" and row.why == "b: it is not here"
    text = comparison.table([row], ["a note"]).text()
    assert "work: b: it is not here" in text and text.endswith("a note\n")


def test_a_process_that_says_nothing_useful() -> None:
    with pytest.raises(NotMeasured, match="ended with code 3: no luck"):
        sides.run([sys.executable, "-c", "import sys; sys.stderr.write('no luck\\n'); sys.exit(3)"])
    with pytest.raises(NotMeasured, match="too small"):
        sides.run([sys.executable, "-c", """print('{"error": {"message": "too small"}}')"""])
    with pytest.raises(NotMeasured, match="no-such-program"):
        sides.run(["no-such-program"])


def test_a_busy_neighbour_is_busy_and_goes() -> None:
    import psutil

    with sides.busy_neighbour():
        (spinner,) = (child for child in psutil.Process().children() if "sched_setaffinity" in " ".join(child.cmdline()))
        assert len(spinner.cpu_affinity()) == 1
        spinner.cpu_percent()
        assert spinner.cpu_percent(0.2) > 5
    assert not spinner.is_running()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rand(context_tokens=512).save(tmp_path_factory.mktemp("cpu") / "tiny")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "side.py"
    path.write_text(SCRIPT)
    return path


def test_speed_of_both_sides(tiny: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (comparison.Target("tg4", "decode", 2.0), comparison.Target("pp8", "prefill", 2.0, "q4_0"))
    monkeypatch.setattr(comparison, "TARGETS", targets)
    monkeypatch.setattr(comparison, "TESTS", ("tg4", "pp8"))
    plan = Plan(
        ours=Ours(str(tiny), 1),
        theirs=Theirs(sys.executable, "x", 1, script),
        theirs_q4_0=None,
        llama_server=None,
        text=None,
        rounds=2,
        say=said,
    )
    rows, details = comparison_parts.speed(plan)
    decode, prefill, floor = rows
    assert decode.theirs == spread([THEIR_SPEED] * 2) and decode.ours is not None and decode.ours.count == 2
    assert decode.ratio is not None and decode.ratio.median == pytest.approx(decode.ours.median / THEIR_SPEED)
    assert prefill.theirs is None and "--q4-0" in prefill.why
    assert floor.unit == "%" and floor.verdict == "no target" and floor.ours is not None and floor.ours.median > 0
    assert details["bandwidth"]["all_threads"] > 0 and details["conditions"]["model"]["threads"] == 1


def test_the_command_goes_on_without_what_is_missing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    arguments = [str(tiny), "--against-llamacpp", "no-such-python", "--rounds", "1", "--parts", "perplexity,busy", "--threads", "1"]
    assert cpu.main([*arguments, "--json", str(target)]) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    assert (document["benchmark"], document["schema"], document["rounds"]) == ("cpu", 1, 1)
    busy, *texts = document["rows"]
    assert busy["ours"]["count"] == 1 and busy["theirs"] is None and "no-such-python" in busy["why"]
    assert [row["why"] for row in texts] == ["no text was given (--text)"] * 3
    out = capsys.readouterr().out
    assert "fewer than 5 rounds" in out and "not measured" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["no-such-file", "--against-llamacpp", "x"], 1, "there is no file no-such-file"),
        ([".", "--against-llamacpp", "x", "--json", "no-such-folder/x"], 1, "there is no folder"),
        (["."], 2, "--against-llamacpp"),
        ([".", "--against-llamacpp", "x", "--parts", "speed,luck"], 2, "no part 'luck'; there are speed, busy"),
        ([".", "--against-llamacpp", "x", "--rounds", "0"], 2, "'0' is not a number from 1 on"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cpu.main(arguments) == status
    except SystemExit as error:
        assert error.code == status
    assert message in capsys.readouterr().err
