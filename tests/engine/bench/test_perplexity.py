"""Perplexity and divergence against sums by hand, and the reference against itself."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench import perplexity
from engine.bench.subject import Setup, load_subject
from tests.fixtures.tiny_rand import oracle_logits, tiny_rand

IDS = [random.Random(4).randrange(320) for _ in range(70)]


def packed(rows: list[list[float]]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def test_losses_by_hand() -> None:
    """The token that follows has probability 1/4 on our side and 1/2 on the other's, then 1/2 and 1/2."""
    ours = packed([[0.0, 0.0, 0.0, 0.0], [math.log(2), math.log(2), 0.0, -100.0], [9.0, 9.0, 9.0, 9.0]])
    log = math.log
    reference = packed([[log(1 / 8), log(1 / 8), log(1 / 2), log(1 / 4)], [log(2), 0.0, log(1), -100.0], [0.0, 0.0, 0.0, 0.0]])
    losses = perplexity.window_losses(ours, reference, [0, 2, 0])
    assert losses.ours == pytest.approx(log(4) + log(5 / 2), abs=1e-6)
    assert losses.reference == pytest.approx(log(2) + log(2), abs=1e-6)
    first = sum(q * log(q / 0.25) for q in (1 / 8, 1 / 8, 1 / 2, 1 / 4))
    second = 0.5 * log(0.5 / 0.4) + 0.25 * log(0.25 / 0.4) + 0.25 * log(0.25 / 0.2)
    assert losses.divergence == pytest.approx(first + second, abs=1e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_logits_of_every_token(tmp_path: Path, window: int | None) -> None:
    model = tiny_rand(3, window=window)
    setup = Setup(context_tokens=70, max_step_tokens=70, max_sequences=1, least_pages=5, backend="reference", kv_dtype="float32")
    subject = load_subject(str(model.save(tmp_path / "m")), lambda *_: None, setup).subject
    got = struct.unpack(f"<{70 * 320}f", perplexity.window_logits(subject, IDS))
    expected = [value for row in oracle_logits(model, IDS).tolist() for value in row]
    assert got == pytest.approx(expected, abs=1e-3)


def test_the_reference_beside_itself(tmp_path: Path) -> None:
    model = tiny_rand(3).save(tmp_path / "m")
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    command = [sys.executable, "-m", "engine.bench.perplexity", str(model), "--ids", str(ids), "--window", "32"]
    done = subprocess.run([*command, "--backend", "reference", "--kv-dtype", "float32"], capture_output=True, timeout=100)
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["backend"], document["tokens"], document["window"]) == ("reference", 62, 32)
    assert document["perplexity"] == document["reference"] > 1 and document["divergence"] == 0
    losses = []
    for part in (IDS[:32], IDS[32:64]):
        chances = oracle_logits(tiny_rand(3), part).double().log_softmax(dim=1)
        losses += [-float(chances[i, id_]) for i, id_ in enumerate(part[1:])]
    assert document["perplexity"] == pytest.approx(math.exp(sum(losses) / 62), rel=1e-4)


@pytest.mark.parametrize(("text", "said"), [("[1, 2]", "2 tokens are no window of 512"), ("{}", "ids.json is no JSON list")])
def test_too_little_text(tmp_path: Path, text: str, said: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(text)
    assert perplexity.main(["no-such-model", "--ids", str(ids)]) == 1
    assert said in json.loads(capfdbinary.readouterr().out)["error"]["message"]
