"""Each part of the benchmark on a subject whose steps take a known time: what it reports must be what can be reckoned by hand."""

from __future__ import annotations

import pytest

from engine.bench import latency, prefix, priorities, throughput, utilisation, workloads
from engine.bench.workloads import Mix
from engine.scheduler.pacing import LEAST_TOKENS
from tests.engine.bench.virtual_subject import STEP_MS, TOKEN_MS, said, virtual_subject


def test_throughput_is_tokens_over_time() -> None:
    sizes = throughput.Sizes(sequences=(1, 4, 32), prompt_tokens=32, output_tokens=10)
    result = throughput.measure(virtual_subject(), sizes, 2, 0, said)
    assert (result.rounds, result.warmup_runs) == (2, 1)
    for row, count in zip(result.rows, (1, 4, 32), strict=True):
        step_ms, first_ms = STEP_MS + count * TOKEN_MS, STEP_MS + 32 * count * TOKEN_MS
        assert row.sequences == count and row.output_tokens == 2 * count * 10
        assert row.step_ms.p50 == pytest.approx(step_ms) and row.step_ms.count == 2 * 9
        assert row.decode_tokens_per_s.median == pytest.approx(count / step_ms * 1e3)
        assert row.sequence_tokens_per_s.median == pytest.approx(1e3 / step_ms)
        assert row.ratio.median == pytest.approx(count * (STEP_MS + TOKEN_MS) / step_ms)
        assert row.prefill_tokens_per_s.median == pytest.approx(32 * count / first_ms * 1e3)
        assert row.total_tokens_per_s.median == pytest.approx(10 * count / (first_ms + 9 * step_ms) * 1e3)


def test_prefix_hits_are_to_the_token_and_save_their_time() -> None:
    result = prefix.measure(virtual_subject(), prefix.Sizes(prompt_tokens=512, output_tokens=8), 2, 0, said)
    assert [(row.cache, row.prefix_tokens, row.cached_tokens) for row in result.rows] == [
        (False, 0, [0, 0]),
        (True, 0, [0, 0]),
        (True, 256, [256, 256]),
        (True, 461, [461, 461]),
    ]
    whole = STEP_MS + 512 * TOKEN_MS
    for row in result.rows:
        first_ms = STEP_MS + (512 - row.cached_tokens[0]) * TOKEN_MS
        assert row.first_token_ms.median == pytest.approx(first_ms)
        assert row.first_token_ratio.median == pytest.approx(first_ms / whole)
        assert row.output_tokens == 2 * 8
        assert row.decode_tokens_per_s.median == pytest.approx(1e3 / (STEP_MS + TOKEN_MS))
        assert row.output_tokens_per_s.median == pytest.approx(8e3 / (first_ms + 7 * (STEP_MS + TOKEN_MS)))


def test_latency_tells_what_a_long_prompt_costs_a_stream() -> None:
    result = latency.measure(virtual_subject(), latency.Sizes(), 1, 0, said)
    assert [row.target_ms for row in result.rows] == [None, 50.0, 100.0, 200.0, None]
    for row in result.rows:
        assert row.alone_ms.p50 == row.alone_ms.most == pytest.approx(STEP_MS + TOKEN_MS)
        assert row.alone_ms.count == 3 * 48
        assert row.beside_ms.count == row.chunk_tokens.count, "a gap for each chunk"
        assert row.stream_tokens == 1 + row.alone_ms.count + row.beside_ms.count + row.adapting_ms.count
        if row.target_ms is None:
            assert (row.decode_reaches, row.chunks_reach, row.p95_over_target, row.within_allowance) == (None,) * 4
        else:
            assert row.decode_reaches and row.chunks_reach and row.within_allowance
            assert row.p95_over_target == pytest.approx(row.beside_ms.p95 / row.target_ms)
            assert row.beside_ms.p95 <= 1.5 * row.target_ms


def test_the_first_variant_has_the_shortest_chunks_there_are() -> None:
    row = latency.measure(virtual_subject(), latency.Sizes(), 1, 0, said).rows[0]
    assert row.chunk_tokens.least == row.chunk_tokens.most == LEAST_TOKENS and row.chunk_tokens.count == 4000 / LEAST_TOKENS
    assert row.beside_ms.most == pytest.approx(STEP_MS + (1 + LEAST_TOKENS) * TOKEN_MS)


def test_without_a_target_chunks_are_all_that_a_step_may_take() -> None:
    """511 beside the one decode; 4000 tokens are 7 such chunks and the rest."""
    row = latency.measure(virtual_subject(), latency.Sizes(), 1, 0, said).rows[-1]
    assert (row.chunk_tokens.most, row.chunk_tokens.median, row.chunk_tokens.count) == (511, 511, 8)
    assert row.beside_ms.p50 == pytest.approx(STEP_MS + 512 * TOKEN_MS)
    rest = 4000 - 7 * 511
    assert row.chunk_tokens.least == rest
    assert row.first_token_ms.median == pytest.approx(8 * STEP_MS + (4000 + 8) * TOKEN_MS)


@pytest.mark.parametrize(
    ("target_ms", "shortest_ms", "reached", "verdict"),
    [
        (15.0, 35.0, (False, False, False), "out of reach here, a decode step alone takes 20.0 ms"),
        (25.0, 35.0, (True, False, False), "out of reach beside a long prompt"),
        (25.0, 24.0, (True, True, False), "p95 ABOVE 1.5 times"),
        (30.0, 35.0, (True, False, True), "out of reach beside a long prompt"),
        (30.0, 25.0, (True, True, True), "p95 within 1.5 times"),
    ],
)
def test_a_target_is_judged_by_what_the_machine_can_do(
    target_ms: float, shortest_ms: float, reached: tuple[bool, bool, bool], verdict: str
) -> None:
    """A decode step of 20 ms alone, and 40 ms beside a prompt."""
    run = latency._Run(alone=[20.0] * 40, adapting=[30.0], beside=[40.0] * 40, first_token_ms=1.0, chunks=[16.0], tokens=3)
    row = latency._row(latency.Variant("it", target_ms, target_ms), [run], shortest_ms)
    assert (row.decode_reaches, row.chunks_reach, row.within_allowance) == reached
    assert row.p95_over_target == pytest.approx(40 / target_ms)
    assert verdict in latency._verdict(row)


def test_latency_fits_a_short_context() -> None:
    result = latency.measure(virtual_subject(context_tokens=512), latency.Sizes(), 1, 0, said)
    assert (result.first_prompt_tokens, result.long_prompt_tokens) == (128, 256)


def test_the_background_keeps_the_engine_full() -> None:
    """Whatever the classes; and the high class is the better off the more work there is."""
    result = priorities.measure(virtual_subject(), priorities.Sizes(), 2, 0, said)
    by_name = {row.variant: row for row in result.rows}
    assert list(by_name) == ["alone", "high over low", "normal over low", "all normal, one client"]
    for row in result.rows:
        assert row.output_tokens == 2 * 12 * 16
        assert (row.first_token_ms.count, row.queue_ms.count) == (24, 24)
        assert row.inter_token_ms.count == 24 * 15
        assert row.running_at_arrival.median == (0 if row.variant == "alone" else 8)
        assert (row.background_tokens_per_s.least == 0) == (row.variant == "alone")
        assert row.first_token_ms.p50 >= STEP_MS + 64 * TOKEN_MS - 1e-9, "a prompt of 64 tokens in one step of its own"
    alone = by_name["alone"]
    assert alone.first_token_ms.most == pytest.approx(STEP_MS + 64 * TOKEN_MS)
    assert alone.inter_token_ms.most == pytest.approx(STEP_MS + TOKEN_MS)
    assert by_name["high over low"].preemptions > 0, "no place is free for it"
    assert by_name["high over low"].first_token_ms.p95 < by_name["all normal, one client"].first_token_ms.p50


def test_utilisation_is_what_can_be_counted_by_hand() -> None:
    """One request at a time in a pool that holds everything: only the last page of each is not full."""
    mix, sizes = Mix("short", 40, 10), utilisation.Sizes(requests=3, at_once=1, pool_share=20)
    run = utilisation._run(mix, sizes, 0, 0)
    expected: list[float] = []
    ended = 0, 0  # slots filled, slots, of the requests before
    for prompt, output in workloads.lengths(mix, 3, 0, 0):
        for computed in range(prompt, prompt + output):
            slots = -(-computed // 16) * 16
            expected.append((ended[0] + computed) / (ended[1] + slots))
        ended = ended[0] + computed, ended[1] + slots
    assert run.filled == pytest.approx(expected)
    assert run.in_use[-1] == pytest.approx(ended[1] / (20 * 50 // 16 * 16))
    assert (run.requests, run.preemptions, run.evicted_pages, run.recomputed_tokens) == (3, 0, 0, 0)
    assert run.tokens_out == sum(output for _, output in workloads.lengths(mix, 3, 0, 0))


def test_a_small_pool_is_fought_over_and_every_token_comes() -> None:
    mix, sizes = Mix("short", 60, 60), utilisation.Sizes(requests=30, at_once=8, pool_share=0.5)
    run = utilisation._run(mix, sizes, 0, 0)
    assert run.preemptions > 0 and run.evicted_pages > 0 and run.recomputed_tokens > 0
    assert run.tokens_out == sum(output for _, output in workloads.lengths(mix, 30, 0, 0))
    assert all(0 < share <= 1 for share in run.filled + run.in_use) and all(0 <= share <= 1 for share in run.owned)
    assert all(owned <= in_use for owned, in_use in zip(run.owned, run.in_use, strict=True))


def test_utilisation_is_the_same_again() -> None:
    sizes = utilisation.Sizes(requests=6)
    assert utilisation.measure(sizes, 1, 3, said) == utilisation.measure(sizes, 1, 3, said)
    assert utilisation.measure(sizes, 1, 3, said) != utilisation.measure(sizes, 1, 4, said)
