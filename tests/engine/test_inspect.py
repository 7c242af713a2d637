"""`python -m engine.inspect`: the facts of both formats, errors as data, fast, without torch, under a memory limit."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.errors import ErrorInfo
from engine.inspect import inspect_model, main
from engine.types import ModelInfo
from tests.fixtures.gguf_writer import ARRAY, STRING, Array, Key, Layout, TensorRow, byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "engine.inspect", *arguments], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert done.stderr == b""
    return done.returncode, done.stdout


def facts(*arguments: str) -> ModelInfo:
    code, out = run(*arguments)
    assert code == 0
    return msgspec.msgpack.decode(out, type=ModelInfo)


def failure(*arguments: str) -> ErrorInfo:
    code, out = run(*arguments)
    assert code == 1
    return msgspec.msgpack.decode(out, type=ErrorInfo)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    model = tiny_rand()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors, byte_vocabulary(320))))
    return path


def test_the_real_model(real_model_path: Path) -> None:
    info = facts(str(real_model_path))
    assert (info.format, info.architecture, info.quantization) == ("gguf", "llama", "Q4_1")
    assert (info.layers, info.embedding_length, info.vocab_size, info.context_tokens) == (30, 576, 49_152, 8192)
    assert (info.parameters, info.weight_bytes) == (134_515_008, 96_576_768)
    assert info.config["rms_norm_eps"] == 1e-5
    assert info.config["tie_word_embeddings"] is True
    assert info.chat_template is not None
    assert info.chat_template.startswith("{% for message in messages %}")
    assert info.vocabulary is not None
    assert len(info.vocabulary.merges) == 48_900
    assert info.warnings == []


@pytest.mark.timing
def test_the_real_model_takes_less_than_300_ms(real_model_path: Path) -> None:
    """Of processor time, which is the wall time on a machine that is not busy with something else."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(str(real_model_path))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def test_torch_and_numpy_are_not_imported(real_model_path: Path, tmp_path: Path) -> None:
    folder = tiny_rand().save(tmp_path / "folder")
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'gguf', 'safetensors'): sys.modules[name] = None\n"
        "from engine.inspect import main\n"
        f"sys.exit(main([{str(real_model_path)!r}]) or main([{str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder(tmp_path: Path, shards: int) -> None:
    model = tiny_rand()
    info = facts(str(model.save(tmp_path / "folder", shards)))
    count = sum(t.numel() for t in model.tensors.values())
    assert (info.format, info.architecture, info.quantization) == ("safetensors", "llama", "F32")
    assert (info.parameters, info.weight_bytes) == (count, 4 * count)
    assert (info.layers, info.embedding_length, info.vocab_size, info.context_tokens) == (2, 64, 320, 512)
    assert info.config == model.config
    assert info.metadata["hidden_act"] == "silu"
    assert info.vocabulary is None


def test_errors_are_data(tmp_path: Path, tiny_gguf: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:-4096])
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_bytes(Layout((Key("general.architecture", STRING, "gpt2"),))))
    for path, code, says in (
        (cut, "corrupt_file", "cut.gguf: has"),
        (tmp_path / "pickle.bin", "corrupt_file", "too short for a GGUF"),
        (tmp_path / "empty", "model_not_found", "config.json"),
        (tmp_path / "absent.gguf", "model_not_found", "absent.gguf"),
        (other, "unsupported_model", "'gpt2'"),
    ):
        error = failure(str(path))
        assert (error.code, says in error.message) == (code, True)
        assert str(tmp_path) not in error.message


def test_a_file_larger_than_the_memory_limit(tmp_path: Path) -> None:
    """Only the header is mapped: a model of 8 GiB (sparse here) is inspected within 512 MiB of address space."""
    model = tiny_rand()
    layout = llama_gguf(model.config, model.tensors, byte_vocabulary(320))
    huge = TensorRow("blk.0.ffn_gate.bias", (1 << 31,))
    path = tmp_path / "huge.gguf"
    path.write_bytes(gguf_bytes(replace(layout, tensors=(*layout.tensors, huge))))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (8 << 30))
    assert facts(str(path), "--memory-limit-bytes", str(512 << 20)).weight_bytes > 8 << 30


def test_what_does_not_fit_in_the_limit_is_an_error(tmp_path: Path) -> None:
    """A vocabulary of 700,000 tokens, within 110 MiB of address space."""
    model = tiny_rand()
    tokens = Key("tokenizer.ggml.tokens", ARRAY, Array(STRING, [f"token {i:060}" for i in range(700_000)]))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors, [tokens])))
    assert failure(str(path), "--memory-limit-bytes", str(110 << 20)).code == "out_of_memory"


def test_the_function_is_what_the_command_prints(tiny_gguf: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([str(tiny_gguf)]) == 0
    printed = msgspec.msgpack.decode(capfdbinary.readouterr().out, type=ModelInfo)
    assert printed == inspect_model(tiny_gguf)
