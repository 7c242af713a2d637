"""The command as a person runs it, on a tiny random model: what is counted must be right, how fast it was is nobody's business."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.bench import batching, conditions, latency, priorities, throughput
from engine.bench.batching import Document
from tests.fixtures.tiny_rand import tiny_rand

REPEATS = 2


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.bench.batching", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], bytes]:
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_rand(context_tokens=512).save(folder / "tiny")
    answer = bench(model, "--quick", "--repeats", str(REPEATS), "--json", folder / "out.json")
    assert answer.returncode == 0, answer.stderr
    return answer, (folder / "out.json").read_bytes()


@pytest.fixture(scope="module")
def document(ran: tuple[subprocess.CompletedProcess[str], bytes]) -> Document:
    """Decoded strictly: every field is there and of its type."""
    return msgspec.json.decode(ran[1], type=Document)


def figures(value: Any) -> Iterator[float]:
    """Every number anywhere in a JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from figures(inner)
    elif isinstance(value, int | float):
        yield value


def test_nothing_is_negative_or_not_a_number(ran: tuple[subprocess.CompletedProcess[str], bytes]) -> None:
    numbers = list(figures(json.loads(ran[1])))
    assert len(numbers) > 300 and all(0 <= number < 1e12 for number in numbers)


def test_the_document_says_what_it_is_and_has_every_part(ran: tuple[subprocess.CompletedProcess[str], bytes]) -> None:
    plain = json.loads(ran[1])
    assert (plain["benchmark"], plain["schema_version"]) == ("batching", 1)
    assert set(plain) == {"benchmark", "schema_version", "conditions", *batching.PARTS}
    assert all(plain[part] is not None for part in batching.PARTS)


def test_the_conditions_are_there(document: Document) -> None:
    under = document.conditions
    assert under.model is not None and under.quick and under.repeats == REPEATS and under.seed == 0
    assert under.machine.cpu and under.machine.physical_cores >= 1 and under.machine.memory_bytes > 1 << 28
    assert under.software.torch and under.software.python == ".".join(map(str, sys.version_info[:3]))
    assert len(under.load_average) == len(under.load_average_after) == 3
    model = under.model
    assert (model.file, model.architecture, model.dtype, model.context_tokens) == ("tiny", "llama", "float32", 512)
    assert model.parameters > 0 and model.file_bytes >= model.weight_bytes > 0 and model.threads >= 1 and sum(model.pages) == 320


def test_no_folder_of_this_machine_is_told(ran: tuple[subprocess.CompletedProcess[str], bytes], tmp_path: Path) -> None:
    assert str(tmp_path.parent) not in ran[1].decode() and str(tmp_path.parent) not in ran[0].stdout


def test_throughput_counts(document: Document) -> None:
    assert document.throughput is not None
    sizes = throughput.QUICK
    assert [row.sequences for row in document.throughput.rows] == list(sizes.sequences)
    for row in document.throughput.rows:
        assert row.output_tokens == REPEATS * row.sequences * sizes.output_tokens
        assert row.step_ms.count == REPEATS * (sizes.output_tokens - 1)
        assert row.decode_tokens_per_s.count == row.ratio.count == REPEATS
        assert row.decode_tokens_per_s.median == pytest.approx(row.sequences * row.sequence_tokens_per_s.median)
    assert document.throughput.rows[0].ratio.median == 1


def test_prefix_hits_are_to_the_token(document: Document) -> None:
    assert document.prefix is not None
    rows = document.prefix.rows
    assert [(row.cache, row.cached_tokens) for row in rows] == [
        (False, [0] * REPEATS),
        (True, [0] * REPEATS),
        (True, [128] * REPEATS),
        (True, [230] * REPEATS),
    ]
    assert {row.output_tokens for row in rows} == {REPEATS * 8}


def test_latency_counts(document: Document) -> None:
    assert document.latency is not None
    assert [row.variant for row in document.latency.rows] == [variant.name for variant in latency.VARIANTS]
    for row in document.latency.rows:
        assert row.alone_ms.count == REPEATS * 3 * latency.QUICK.alone_tokens
        assert row.beside_ms.count == row.chunk_tokens.count >= REPEATS
        assert 1 <= row.chunk_tokens.least <= row.chunk_tokens.most <= 511
        assert row.stream_tokens == REPEATS + row.alone_ms.count + row.adapting_ms.count + row.beside_ms.count


def test_priorities_count(document: Document) -> None:
    assert document.priorities is not None
    sizes = priorities.QUICK
    for row in document.priorities.rows:
        assert row.output_tokens == REPEATS * sizes.requests * sizes.output_tokens
        assert row.first_token_ms.count == REPEATS * sizes.requests
        assert row.inter_token_ms.count == REPEATS * sizes.requests * (sizes.output_tokens - 1)


def test_pages_are_used_as_well_as_promised(document: Document) -> None:
    """Not a matter of speed: the clock of this part is its own."""
    assert document.utilisation is not None and "no model" in document.utilisation.executor
    assert [row.mix for row in document.utilisation.rows] == ["service dialogue", "tickets", "contract review"]
    for row in document.utilisation.rows:
        assert row.reaches_goal and row.utilisation.least >= 0.9
        assert row.utilisation.count == REPEATS and row.requests == REPEATS * 24


def test_tables_go_to_stdout_and_progress_does_not(ran: tuple[subprocess.CompletedProcess[str], bytes]) -> None:
    out, progress = ran[0].stdout, ran[0].stderr
    for title in ("Throughput:", "Prefix hits:", "Inter-token ms", "Priorities:", "Page utilisation:"):
        assert title in out and title not in progress
    assert "QUICK: not to be compared" in out and "latency: round 2 of 2" in progress


def test_pages_alone_need_no_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(batching, "load_subject", None)
    assert batching.main(["no-such-model", "--quick", "--parts", "utilisation", "--json", str(tmp_path / "out")]) == 0
    document = msgspec.json.decode((tmp_path / "out").read_bytes(), type=Document)
    assert document.conditions.model is None and document.conditions.software.torch is None
    assert document.utilisation is not None and document.throughput is None
    assert "Page utilisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["no-such-file.gguf"], 1, "error: "),
        (["x", "--json", "no-such-folder/out.json"], 1, "error: there is no folder"),
        (["x", "--parts", "throughput,speed"], 2, "no part 'speed'; there are throughput, prefix"),
        (["x", "--repeats", "0"], 2, "'0' is not a number from 1 on"),
        (["x", "--repeats", "many"], 2, "'many' is not a number from 1 on"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert batching.main(arguments) == status
    except SystemExit as error:
        assert error.code == status
    assert message in capsys.readouterr().err


def test_machines_without_a_list_of_processors_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert conditions.machine().isa_flags == []
