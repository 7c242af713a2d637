"""The other side's driver over a library that only notes what it is asked: a test's name must mean the same work as on ours."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.bench import notation
from engine.bench.sides import THEIR_SCRIPT

VOCAB = 50
LIBRARY = f"""
import atexit, ctypes, json, types
import numpy as np

__version__ = "0"
CALLS = []
atexit.register(lambda: open("calls.json", "w").write(json.dumps(CALLS)))
llama_token = ctypes.c_int32
llama_log_callback = lambda function: function
llama_log_set = llama_backend_init = llama_synchronize = llama_batch_free = llama_free = lambda *_: None
llama_model_default_params = llama_context_default_params = types.SimpleNamespace
llama_model_get_vocab = lambda model: model
llama_vocab_n_tokens = lambda vocabulary: {VOCAB}
llama_get_memory = lambda context: context

def llama_model_load_from_file(path, parameters):
    CALLS.append(["load", path.decode(), parameters.use_extra_bufts])
    return 1

def llama_init_from_model(model, p):
    CALLS.append(["context", p.n_ctx, p.n_seq_max, p.n_threads, p.n_threads_batch])
    return 2

def llama_memory_clear(memory, data):
    CALLS.append(["clear"])

def llama_tokenize(vocabulary, text, length, ids, room, add, parse):
    ids[:length] = list(text)
    return length

def llama_batch_init(tokens, embeddings, sequences):
    rows = lambda: [None] * tokens
    return types.SimpleNamespace(token=rows(), pos=rows(), logits=rows(), n_seq_id=rows(), seq_id=[[None] for _ in range(tokens)])

def llama_decode(context, batch):
    count = batch.n_tokens
    CALLS.append(["decode", [[batch.token[i], batch.pos[i], batch.seq_id[i][0], bool(batch.logits[i])] for i in range(count)]])
    global logits
    wanted = [batch.token[i] for i in range(count) if batch.logits[i]]
    logits = np.zeros((len(wanted), {VOCAB}), np.float32)
    for row, id_ in enumerate(wanted):  # twice as likely as any other: the id after the one that was fed
        logits[row, (id_ + 1) % {VOCAB}] = np.log(2)
    return 0

def llama_get_logits(context):
    return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
"""


@pytest.fixture
def side(tmp_path: Path) -> Any:
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)

    def run(*arguments: str) -> tuple[dict[str, Any], list[list[Any]]]:
        command = [sys.executable, str(THEIR_SCRIPT), "m.gguf", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), json.loads((tmp_path / "calls.json").read_text())

    return run


def decodes(calls: list[list[Any]]) -> list[list[list[Any]]]:
    return [call[1] for call in calls if call[0] == "decode"]


def test_a_prefill_is_warmed_up_with_another_prompt(side: Any) -> None:
    answer, calls = side("--tests", "pp6", "--reps", "2", "--threads", "3")
    assert set(answer["pp6"]) == {"median", "min", "max", "n", "unit"} and answer["pp6"]["n"] == 2
    assert [call[0] for call in calls] == ["load", *["context", "decode", "clear", "decode"] * 2]
    assert calls[0] == ["load", "m.gguf", True] and calls[1][3:] == [3, 3]
    prompts = [[row[0] for row in rows] for rows in decodes(calls)]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    for rows in decodes(calls):
        assert [row[1:] for row in rows] == [[position, 0, position == 5] for position in range(6)]


@pytest.mark.parametrize(("name", "depth", "sequences"), [("tg3", 1, 1), ("tg3@7", 7, 1), ("tg3@7x2", 7, 2), ("tg3x2", 128, 2)])
def test_a_decode_feeds_the_likeliest_token(side: Any, name: str, depth: int, sequences: int) -> None:
    _, calls = side("--tests", name, "--reps", "1")
    prompts, steps = decodes(calls)[:sequences], decodes(calls)[sequences:]
    assert [[row[1:3] for row in rows] for rows in prompts] == [
        [[position, sequence] for position in range(depth)] for sequence in range(sequences)
    ]
    assert len(steps) == 1 + 3
    for number, rows in enumerate(steps):
        assert [row[1:] for row in rows] == [[depth + number, sequence, True] for sequence in range(sequences)]
        assert not number or [row[0] for row in rows] == [(row[0] + 1) % VOCAB for row in steps[number - 1]]


def test_a_prompt_longer_than_a_batch(side: Any) -> None:
    _, calls = side("--tests", "tg1@3000", "--reps", "1")
    first, second, *_ = decodes(calls)
    assert (len(first), len(second)) == (2048, 952)
    assert not any(row[3] for row in first) and [row[3] for row in second] == [False] * 951 + [True]
    assert [row[1] for row in first + second] == list(range(3000))


def test_perplexity(side: Any, tmp_path: Path) -> None:
    """Ids that count up are always the likeliest: 2 of 51. The window that is not full does not count."""
    (tmp_path / "ids.json").write_text(json.dumps([*range(10), *range(20, 30), 1, 2]))
    answer, calls = side("--perplexity", "ids.json", "--window", "10", "--no-extra-buffers")
    assert answer["tokens"] == 18 and answer["perplexity"] == pytest.approx((VOCAB + 1) / 2, rel=1e-6)
    assert calls[0][2] is False and len(decodes(calls)) == 2
    assert all(row[3] for rows in decodes(calls) for row in rows) and math.isfinite(answer["perplexity"])


def test_tokenize(side: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abcdef")
    assert side("--tokenize", "text", "--count", "4")[0]["ids"] == list(b"abcd")


@pytest.mark.parametrize("name", ["pp8@4", "pp8x2", "quick", "tg"])
def test_names_are_those_of_our_side(tmp_path: Path, name: str) -> None:
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)
    command = [sys.executable, str(THEIR_SCRIPT), "m.gguf", "--tests", name]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"no speed test is called {name!r}" in done.stderr


def test_the_default_is_the_same_on_both_sides() -> None:
    source = THEIR_SCRIPT.read_text(encoding="utf-8")
    assert f'DEFAULT_TESTS = "{notation.DEFAULT_TESTS}"' in source
