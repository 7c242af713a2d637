"""From files to an engine: what is reported, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import CavectlError, OutOfMemory
from engine.kernels.cpu.lib import NativeUnavailable
from engine.runtime import load, native_load, torch_load
from engine.runtime.load import build_engine
from engine.types import WorkerConfig
from tests.fixtures.tiny_rand import tiny_rand


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tiny_rand(1, context_tokens=128).save(tmp_path_factory.mktemp("tiny"))
    return WorkerConfig(model_path=str(folder), format="safetensors", context_tokens=64, threads=1, backend="reference")


def _silent(stage: str, fraction: float) -> None:
    """No progress wanted."""


def test_the_report_is_what_was_loaded(config: WorkerConfig) -> None:
    built = build_engine(config, _silent)
    engine, info = built.engine, built.info
    tensors = tiny_rand(1, context_tokens=128).tensors
    assert info.parameters == sum(t.numel() for t in tensors.values())
    assert info.weight_bytes == 4 * info.parameters
    assert (info.backend, info.device, info.dtype, info.kv_dtype) == ("reference", "cpu", "float32", "float32")
    assert (info.context_tokens, info.vocab_size, info.page_tokens) == (64, 320, 16)
    assert info.pages_total == engine.stats.pages_total
    assert info.threads == torch.get_num_threads() == 1
    assert info.load_ms > 0
    assert info.degraded == []


def test_the_settings_of_the_cache_reach_the_engine(config: WorkerConfig) -> None:
    """Weights, digest, types and backend are part of the keys: what another model or type computed is never shared."""
    given = {
        "target_step_ms": 20.0,
        "aging_s": 3.0,
        "prefix_cache": False,
        "chat_retention_s": 50.0,
        "rest_retention_s": 5.0,
        "accounting_interval_s": 0.5,
    }
    engine = build_engine(msgspec.structs.replace(config, model_digest="abc", kv_dtype="int8", **given), _silent).engine
    assert {name: getattr(engine._options, name) for name in given} == given
    assert engine._options.model == "abc"
    formats = {
        build_engine(msgspec.structs.replace(config, dtype=dtype, kv_dtype=kv_dtype), _silent).engine._options.format
        for dtype in ("float32", "bfloat16")
        for kv_dtype in ("float32", "float16", "int8")
    }
    assert len(formats) == 6


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    model = tiny_rand(1, tied=True)
    path = str(model.save(tmp_path / "tied"))
    info = build_engine(
        WorkerConfig(model_path=path, format="safetensors", backend="reference", context_tokens=64, threads=1), _silent
    ).info
    assert info.weight_bytes == 4 * sum(t.numel() for t in model.tensors.values())


def test_what_runs_other_than_asked_is_said(config: WorkerConfig) -> None:
    asked = msgspec.structs.replace(config, backend="auto", kv_dtype="bfloat16", context_tokens=100_000, kv_memory_bytes=1 << 14)
    info = build_engine(asked, _silent).info
    assert info.context_tokens == 128 and info.backend == "reference"
    text = "\n".join(info.degraded)
    assert "the reference backend (plain torch) runs this model: the cpu backend does not have a cache of bfloat16" in text
    assert "128 tokens, all the model was made for, not 100000" in text
    assert "4 pages, too few for one context of 128 tokens" in text


def test_the_native_backend_is_the_one_that_runs_where_it_can(config: WorkerConfig) -> None:
    for backend in ("auto", "cpu"):
        info = build_engine(msgspec.structs.replace(config, backend=backend), _silent).info
        assert (info.backend, info.device, info.dtype, info.kv_dtype) == ("cpu", "cpu", "float32", "float16")
        assert info.degraded == []


def test_without_the_native_library_the_reference_runs_and_one_line_says_why(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise NativeUnavailable("the native backend is not built: there is no C++ compiler")

    monkeypatch.setattr(native_load, "load", missing)
    info = build_engine(msgspec.structs.replace(config, backend="auto"), _silent).info
    assert info.backend == "reference"
    [line] = info.degraded
    assert line == "the reference backend (plain torch) runs this model: the native backend is not built: there is no C++ compiler"
    with pytest.raises(NativeUnavailable):
        build_engine(msgspec.structs.replace(config, backend="cpu"), _silent)


def test_progress_goes_from_nothing_to_everything(config: WorkerConfig) -> None:
    seen: list[float] = []
    build_engine(config, lambda stage, fraction: seen.append(fraction))
    assert seen == sorted(seen) and seen[0] == 0.0 and seen[-1] == 1.0


@pytest.mark.parametrize(
    "change", [{"backend": "cpu", "dtype": "float64"}, {"backend": "cuda"}, {"device": "cuda:97"}, {"device": "tpu"}]
)
def test_what_is_not_here_is_refused_not_replaced(config: WorkerConfig, change: dict[str, str]) -> None:
    with pytest.raises(CavectlError) as caught:
        build_engine(msgspec.structs.replace(config, **change), _silent)
    assert caught.value.code == "device_unavailable"


def test_the_grant_of_the_config_counts_like_free_memory(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_engine(config, _silent).info
    monkeypatch.setattr(load.platform, "available_memory_bytes", lambda: 1 << 40)
    same = build_engine(msgspec.structs.replace(config, memory_bytes=1 << 39), _silent).info
    assert same.pages_total == whole.pages_total
    with pytest.raises(OutOfMemory, match=r"0\.00 GB are available"):
        build_engine(msgspec.structs.replace(config, memory_bytes=1_000_000), _silent)


def test_nothing_is_read_into_memory_that_does_not_fit(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        pytest.fail("weights were loaded although they do not fit")

    monkeypatch.setattr(torch_load, "load_weights", never)
    monkeypatch.setattr(load.platform, "available_memory_bytes", lambda: 1_000_000)
    with pytest.raises(OutOfMemory, match=r"0\.00 GB are available"):
        build_engine(config, _silent)
