"""What a decode must read, counted by hand, and the bandwidth it is held against."""

from __future__ import annotations

import pytest

from engine.bench import floor
from engine.bench.notation import parse_test
from engine.bench.timing import spread
from engine.cache.layout import CacheGroup, CacheLayout, Plane

WEIGHTS = 1000


def group(kind: str, window: int | None) -> CacheGroup:
    """One layer of 2 heads of 8 numbers: 64 bytes of keys and values per token in float16."""
    planes = tuple(Plane(name, 0, "float16", (2, 8)) for name in ("k", "v"))
    return CacheGroup(kind, window, (0,), planes)  # type: ignore[arg-type]


def test_every_token_before_is_read() -> None:
    layout = CacheLayout((group("full", None),))
    assert floor.bytes_per_token(parse_test("tg1@9"), WEIGHTS, layout) == WEIGHTS + 64 * 10


def test_sequences_share_the_weights_and_not_the_cache() -> None:
    layout = CacheLayout((group("full", None),))
    assert floor.bytes_per_token(parse_test("tg1@9x4"), WEIGHTS, layout) == WEIGHTS / 4 + 64 * 10


def test_a_window_is_read_to_its_end_only() -> None:
    layout = CacheLayout((group("full", None), group("window", 5)))
    assert floor.bytes_per_token(parse_test("tg1@9"), WEIGHTS, layout) == WEIGHTS + 64 * 10 + 64 * 5
    assert floor.bytes_per_token(parse_test("tg1@3"), WEIGHTS, layout) == WEIGHTS + 64 * 4 + 64 * 4


def test_a_state_does_not_grow() -> None:
    state = CacheGroup("state", None, (0,), (Plane("state", 0, "float32", (100,)),))
    for name in ("tg1@9", "tg1@900"):
        assert floor.bytes_per_token(parse_test(name), WEIGHTS, CacheLayout((state,))) == WEIGHTS + 400


def test_the_share_of_the_floor() -> None:
    reached = floor.share(token_bytes=100.0, tokens_per_s=40.0, bytes_per_s=5000.0)
    assert (reached.tokens_per_s, reached.percent) == (50.0, 80.0)


def test_without_a_library_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.errors import CavectlError

    def none(*_: int) -> floor.Spread:
        raise CavectlError("there is no library")

    monkeypatch.setattr(floor, "read_bandwidth", none)
    measured = floor.measure(1, WEIGHTS, CacheLayout((group("full", None),)), [(parse_test("tg1"), 5.0)])
    assert (measured.bandwidth, measured.why, measured.tests) == (None, "there is no library", {})


def test_bandwidth_is_measured() -> None:
    for threads in (1, 2):
        of = floor.read_bandwidth(8 << 20, threads)
        assert 0 < of.least <= of.median <= of.most < 10_000 and of.count == floor.REPEATS


def test_a_test_is_held_against_reading_what_its_steps_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills have no floor. The weights are large here, so that no buffer is taken larger than a step."""
    weights, read = 4 << 20, list[tuple[int, int]]()

    def measured(buffer_bytes: int, threads: int) -> floor.Spread:
        read.append((buffer_bytes, threads))
        return spread([1.0, float(threads)])

    monkeypatch.setattr(floor, "read_bandwidth", measured)
    medians = [(parse_test("pp4"), 9.0), (parse_test("tg1@9x2"), 5.0)]
    found = floor.measure(3, weights, CacheLayout((group("full", None),)), medians)
    assert read == [(256 << 20, 1), (256 << 20, 3), (weights + 2 * 640, 3)]
    assert found.why is None and found.weight_bytes == weights and found.bandwidth is not None
    assert (found.bandwidth.one_thread.most, found.bandwidth.all_threads.most, found.bandwidth.threads) == (1, 3, 3)
    assert list(found.tests) == ["tg1@9x2"]
    test = found.tests["tg1@9x2"]
    assert (test.bytes_per_token, test.step_gb_per_s) == (weights / 2 + 640, 3)
    assert test.tokens_per_s == pytest.approx(3e9 / (weights / 2 + 640), abs=0.1)


def test_impossible_measurements_are_refused() -> None:
    from engine.errors import CavectlError

    with pytest.raises(CavectlError, match="256 bytes"):
        floor.read_bandwidth(100, 1)
    with pytest.raises(CavectlError, match="4096 threads"):
        floor.read_bandwidth(1 << 20, 0)
