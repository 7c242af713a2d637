"""`python -m engine.pack`: a report or an error as data, a fresh target left alone, limits kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.errors import ErrorInfo, UnsupportedModel
from engine.pack import main, pack_model
from engine.types import PackReport
from engine.weights.packed import PackedFile
from tests.fixtures.gguf_writer import gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    model = tiny_rand()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors)))
    return path


def run(path: Path, target: Path, *arguments: str) -> tuple[int, bytes]:
    command = [sys.executable, "-m", "engine.pack", str(path), "--target", str(target), "--digest", DIGEST, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert done.stderr == b""
    return done.returncode, done.stdout


def failure(path: Path, target: Path, *arguments: str) -> ErrorInfo:
    code, out = run(path, target, *arguments)
    assert code == 1
    error = msgspec.msgpack.decode(out, type=ErrorInfo)
    assert str(path.parent) not in error.message and "\n" not in error.message
    return error


def test_the_real_model(real_model_path: Path, tmp_path: Path) -> None:
    code, out = run(real_model_path, tmp_path / "packed", "--memory-limit-bytes", str(5 << 30))
    report = msgspec.msgpack.decode(out, type=PackReport)
    assert (code, report.made, report.notes) == (0, True, [])
    assert (report.source_bytes, report.packed_bytes) == (96_576_768, (tmp_path / "packed").stat().st_size)
    packed = PackedFile.open(tmp_path / "packed", DIGEST)
    assert (packed.meta.source, packed.meta.types[0]) == (real_model_path.name, "Q8_0")
    packed.close()


def test_a_fresh_target_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"
    assert pack_model(str(tiny_gguf), target, DIGEST).made
    written = target.stat().st_mtime_ns
    assert not pack_model(str(tiny_gguf), target, DIGEST).made
    assert target.stat().st_mtime_ns == written
    assert pack_model(str(tiny_gguf), target, "sha256:" + "cd" * 32).made
    os.truncate(target, 1000)
    assert pack_model(str(tiny_gguf), target, DIGEST).made


def test_files_that_are_no_model(tiny_gguf: Path, tmp_path: Path) -> None:
    assert failure(tmp_path / "absent.gguf", tmp_path / "packed").code == "model_not_found"
    data = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(data[:-100])
    assert failure(tiny_gguf, tmp_path / "packed").code == "corrupt_file"
    assert not (tmp_path / "packed").exists()


def test_limits(tiny_gguf: Path, tmp_path: Path) -> None:
    assert failure(tiny_gguf, tmp_path / "packed", "--keep-free-bytes", str(1 << 60)).code == "no_space"
    assert failure(tiny_gguf, tmp_path / "gone" / "packed").code == "store_error"
    assert sorted(os.listdir(tmp_path)) == ["tiny.gguf"]


def test_what_the_backend_does_not_run_is_not_packed(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.pack.unsupported", lambda spec, kv_dtype: ["recurrent layers", "layer norms"])
    with pytest.raises(UnsupportedModel, match="does not run recurrent layers, layer norms"):
        pack_model(str(tiny_gguf), tmp_path / "packed", DIGEST)
    assert sorted(os.listdir(tmp_path)) == ["tiny.gguf"]


def test_arguments_that_are_missing_are_a_usage_error(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tiny_gguf)])
    assert caught.value.code == 2 and "--target" in capsys.readouterr().err
