"""A loaded model whose sequences become longer: with the right tokens, with numbers where it cannot, by a reload where it must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.built import Built, NeedsReload
from engine.errors import ContextLengthExceeded, InvalidRequest, OutOfMemory
from engine.kernels.reference import ReferenceOps
from engine.runtime import load
from engine.runtime.load import build_engine
from engine.types import EngineRequest, SamplingParams, WorkerConfig
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, tiny_rand

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _built(folder: Path, model: TinyRand, **fields: Any) -> Built:
    config = WorkerConfig(model_path=str(model.save(folder)), format="safetensors", context_tokens=64, threads=1)
    return build_engine(
        msgspec.structs.replace(config, dtype="float64", kv_dtype="float64", **fields), lambda stage, fraction: None
    )


def _grow(built: Built, context_tokens: int) -> Any:
    assert built.grow is not None
    return built.grow(context_tokens)


def test_it_grows_under_a_running_request_and_serves_what_is_longer(tmp_path: Path) -> None:
    model = tiny_rand(2, context_tokens=256)
    built = _built(tmp_path / "m", model)
    engine = built.engine
    short, long = list(range(30)), [(3 * t + t * t) % 320 for t in range(150)]
    engine.add(EngineRequest(id=1, prompt=short, max_tokens=25, sampling=GREEDY))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(8):
        _take(built, tokens)
    with pytest.raises(ContextLengthExceeded):
        engine.add(EngineRequest(id=2, prompt=long, max_tokens=20, sampling=GREEDY))
    info = _grow(built, 200)
    assert info.context_tokens == 200 and info.kv_bytes > built.info.kv_bytes and info.pages_total == engine.stats.pages_total
    engine.check()
    engine.add(EngineRequest(id=2, prompt=long, max_tokens=20, sampling=GREEDY))
    while engine.has_work:
        _take(built, tokens)
    assert tokens == {1: oracle_greedy(model, short, 25), 2: oracle_greedy(model, long, 20)}


def _take(built: Built, tokens: dict[int, list[int]]) -> None:
    result = built.engine.step()
    assert result is not None
    for output in result.outputs:
        tokens[output.request] += [token.id for token in output.tokens]


@pytest.mark.parametrize("context", [1, 63, 64])
def test_what_is_not_longer_changes_nothing(tmp_path: Path, context: int) -> None:
    built = _built(tmp_path / "m", tiny_rand(2, context_tokens=256))
    assert _grow(built, context) is built.info


def test_more_than_the_model_holds_is_refused_with_both_numbers(tmp_path: Path) -> None:
    built = _built(tmp_path / "m", tiny_rand(2, context_tokens=256))
    with pytest.raises(InvalidRequest, match=r"257.*256"):
        _grow(built, 257)


def test_a_cache_of_a_fixed_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = tiny_rand(2, context_tokens=256)
    page = 2 * 2 * 16 * 2 * 16 * 8
    built = _built(tmp_path / "m", model, kv_memory_bytes=10 * page)
    assert _grow(built, 160).context_tokens == 160, "ten pages hold 160 tokens"
    with pytest.raises(OutOfMemory, match=r"16 cache pages and there are 10"):
        _grow(built, 256)
    assert built.engine.stats.pages_total == 10


def test_what_does_not_fit_in_memory_is_refused_and_all_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = _built(tmp_path / "m", tiny_rand(2, context_tokens=256))
    monkeypatch.setattr(load.platform, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(OutOfMemory, match=r"256 tokens needs .* GB of cache and .* GB are available"):
        _grow(built, 256)
    assert built.engine.stats.pages_total == built.info.pages_total
    monkeypatch.undo()
    assert _grow(built, 256).context_tokens == 256


def test_what_the_daemon_grants_counts_like_free_memory(tmp_path: Path) -> None:
    """Plenty is free, and what was granted holds one context of 64 tokens and hardly more."""
    model = tiny_rand(2, context_tokens=4096)
    whole = _built(tmp_path / "m", model).info
    built = _built(tmp_path / "n", model, memory_bytes=whole.weight_bytes + whole.kv_bytes + (4 << 20), max_step_tokens=32)
    page = whole.kv_bytes // whole.pages_total
    with pytest.raises(OutOfMemory, match=rf"4096 tokens needs {256 * page / 1e9:.2f} GB of cache and 0\.00 GB are available"):
        _grow(built, 4096)
    assert _grow(built, 128).context_tokens == 128


def test_memory_that_the_system_refuses_is_told_and_all_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_rand(2, context_tokens=256)
    built = _built(tmp_path / "m", model)
    prompt = list(range(30))
    built.engine.add(EngineRequest(id=1, prompt=prompt, max_tokens=20, sampling=GREEDY))
    tokens: dict[int, list[int]] = {1: []}
    for _ in range(5):
        _take(built, tokens)

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceOps, "allocate_plane", refuse)
        with pytest.raises(OutOfMemory, match=r"gave no .* GB .* has .* GB now"):
            _grow(built, 256)
    built.engine.check()
    while built.engine.has_work:
        _take(built, tokens)
    assert tokens[1] == oracle_greedy(model, prompt, 20)
    assert built.engine.stats.pages_total == built.info.pages_total


def test_it_grows_again_from_where_it_is(tmp_path: Path) -> None:
    built = _built(tmp_path / "m", tiny_rand(2, context_tokens=256))
    infos = [_grow(built, context) for context in (100, 80, 200, 256)]
    assert [info.context_tokens for info in infos] == [100, 100, 200, 256]
    assert infos[1] is infos[0]
    assert [info.pages_total for info in infos] == sorted(info.pages_total for info in infos)
    assert infos[-1].pages_total >= 256 // 16 and infos[-1].pages_total == built.engine.stats.pages_total


def test_a_position_encoding_made_for_its_context_needs_a_reload(tmp_path: Path) -> None:
    model = tiny_rand(2, context_tokens=64, rope={"rope_type": "dynamic", "factor": 4.0})
    built = _built(tmp_path / "m", model)
    with pytest.raises(NeedsReload):
        _grow(built, 128)
