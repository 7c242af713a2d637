"""What is free counts what workers were promised and have not taken; and small models stay side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.memory import PROCESS_BYTES, Holder, Kept, available_bytes, resident_bytes
from engine.types import ModelInfo
from tests.daemon.real_worker import real_daemon, send
from tests.daemon.scripted import MODEL, ndjson
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

GIB = 1 << 30
OTHER = "tiny/other:latest"


def test_a_promise_counts_until_it_is_taken() -> None:
    code = f"import sys; b = bytearray({GIB // 4}); b[::4096] = b'x' * len(b[::4096]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        left = Holder(child.pid, GIB).untaken_bytes
        assert 0.6 * GIB < left - PROCESS_BYTES < 0.75 * GIB
        assert Holder(child.pid, 0).untaken_bytes < PROCESS_BYTES
        child.stdin.close()
    assert Holder(child.pid, GIB).untaken_bytes == 0, "it is gone"


def test_what_is_promised_is_not_free() -> None:
    far_more = 1 << 50
    assert available_bytes([Holder(os.getpid(), far_more)]) < 0 < available_bytes()


@pytest.mark.parametrize(
    ("kept", "weights", "value_bytes"),
    [
        (Kept("auto", "auto"), 98_000_000, 2),
        (Kept("cpu", "auto"), 98_000_000, 2),
        (Kept("reference", "auto"), 134_000_000 * 4, 4),
        (Kept("cuda", "auto"), 134_000_000 * 4, 4),
        (Kept("auto", "int8"), 98_000_000, 1),
        (Kept("cpu", "float32"), 98_000_000, 4),
        (Kept("reference", "float16"), 134_000_000 * 4, 2),
    ],
)
def test_the_estimate_is_that_of_the_backend(kept: Kept, weights: int, value_bytes: int) -> None:
    """30 layers of 3 key-value heads of 64, keys and values, for 1000 tokens."""
    info = ModelInfo(
        format="gguf",
        architecture="llama",
        name="",
        parameters=134_000_000,
        weight_bytes=98_000_000,
        quantization="Q4_1",
        context_tokens=2048,
        embedding_length=576,
        layers=30,
        vocab_size=49152,
        config={"num_attention_heads": 9, "num_key_value_heads": 3},
        metadata={},
    )
    assert resident_bytes(info, 1000, kept) == PROCESS_BYTES + weights + 30 * 3 * 64 * 2 * 1000 * value_bytes


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    folders = []
    for seed in (0, 1):
        folders.append(tiny_rand(seed, context_tokens=256).save(tmp_path / str(seed)))
        write_tiny_tok(folders[-1])
    return folders


def test_two_small_models_stay_loaded_together(two: list[Path]) -> None:
    with real_daemon(two[0], MODEL) as daemon:
        assert ndjson(daemon.post("/api/import", {"path": str(two[1]), "name": OTHER}).body)[-1]["model"] == OTHER
        seen = []
        for name in (MODEL, OTHER, MODEL, OTHER):
            assert send(daemon, "/v1/completions", {"model": name, "prompt": "the", "max_tokens": 2}).status == 200
            seen.append({model["name"]: model["pid"] for model in daemon.get("/api/ps").json["models"]})
        assert set(seen[1]) == {MODEL, OTHER} and seen[1] == seen[2] == seen[3], "neither was loaded again"
        assert "unloading" not in daemon.log
