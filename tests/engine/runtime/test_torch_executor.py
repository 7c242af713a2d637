"""TorchExecutor against TinyRand's full-recompute oracle: chunking, batching, windows, trees, faults and refused inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.errors import InvalidRequest
from engine.kernels.ops import Linear
from engine.kernels.reference import ReferenceOps
from engine.runtime.batch import FROM_PREVIOUS, NO_PAGE, Row, SamplingSlot, StepInputs
from engine.types import SamplingParams
from tests.engine.runtime.harness import GREEDY, Harness, Line, forward
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, oracle_logits, tiny_rand

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "window": {"window": 8},
    "llama3": {"rope": LLAMA3},
    "linear": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_oracle_in_any_chunking(name: str) -> None:
    model, given = tiny_rand(5, **MODELS[name]), tokens(100)
    expected = oracle_logits(model, given)
    for chunk in (None, 1, 3, 16, 33, 99):
        harness = Harness(model)
        harness.poison()
        got = harness.logits(harness.line(given), chunk)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_the_oracle(name: str) -> None:
    model, prompt = tiny_rand(3, **MODELS[name]), tokens(20, 1)
    assert Harness(model).generate(prompt, 24) == oracle_greedy(model, prompt, 24)


@pytest.mark.parametrize("prompt", [15, 16, 17, 32])
def test_b45_chunks_change_no_token(prompt: int) -> None:
    model, given = tiny_rand(8), tokens(prompt, prompt)
    expected = oracle_greedy(model, given, 20)
    for chunk in (1, 3, 16, prompt - 1, prompt, None):
        assert Harness(model, dtype="float32").generate(given, 20, chunk) == expected


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("chunk", [None, 3, 8])
def test_b33_window_equals_the_dense_mask(prompt: int, chunk: int | None) -> None:
    model, given = tiny_rand(4, window=8), tokens(prompt, 2)
    expected = oracle_greedy(model, given, 20)
    harness = Harness(model)
    harness.poison()
    assert harness.generate(given, 20, chunk) == expected
    line = harness.line([*given, *expected])
    got = harness.logits(line, chunk)
    torch.testing.assert_close(got, oracle_logits(model, line.tokens), atol=1e-10, rtol=0)


def test_b33_a_query_sees_itself_and_seven_before() -> None:
    """Changing the token 8 back, in a model of one layer, changes nothing; changing the one 7 back does."""
    model = tiny_rand(4, window=8, layers=1)
    given = tokens(30)
    base = Harness(model).logits(Harness(model).line(given))[-1]
    for back, same in ((8, True), (7, False)):
        other = list(given)
        other[-1 - back] ^= 1
        harness = Harness(model)
        assert torch.equal(harness.logits(harness.line(other))[-1], base) == same


def test_pages_that_fell_out_of_a_window_are_not_read() -> None:
    model, given = tiny_rand(4, window=8), tokens(60)
    harness = Harness(model)
    a, b = harness.line(given), harness.line(given[:50])
    harness.step([(a, 50), (b, 49)])
    gone = [page for pages in (a.pages[0], b.pages[0]) for page in pages[:2]]  # tokens 0..31; the next queries see 42 or 43 on
    for plane in harness.executor._planes[0].values():
        plane[gone] = torch.nan
    a.pages[0][:2] = b.pages[0][:2] = [NO_PAGE, NO_PAGE]
    together = harness.step([(a, 10), (b, 1)])
    alone = oracle_greedy(model, given, 1), oracle_greedy(model, given[:50], 1)
    assert [[t.id for t in out.tokens] for out in together] == list(alone)
    both = harness.step([(a, None), (b, None)])  # single-token rows, batched
    assert both[0].tokens[0].id == oracle_greedy(model, given, 2)[1]
    assert both[1].tokens[0].id == oracle_greedy(model, given[:50], 2)[1]


def _round(model: TinyRand, prompts: Sequence[list[int]], rng: random.Random, count: int) -> list[list[int]]:
    """All prompts at once, each fed in chunks of its own and joining late, until each has `count` tokens."""
    harness = Harness(model, total_pages=512)
    harness.poison()
    lines = [harness.line(p) for p in prompts]
    while True:
        live = [(line, p) for line, p in zip(lines, prompts, strict=True) if len(line.tokens) < len(p) + count]
        if not live:
            return [line.tokens[len(p) :] for line, p in zip(lines, prompts, strict=True)]
        some = [line for line, _ in live if rng.random() < 0.8] or [live[0][0]]
        rng.shuffle(some)
        harness.step([(line, rng.choice([None, 1, 5, 16])) for line in some])


@pytest.mark.parametrize("window", [None, 8])
def test_b09_one_distinct_output_whatever_the_batch(window: int | None) -> None:
    model, rng = tiny_rand(9, window=window), random.Random(1)
    watched = tokens(21, 77)
    expected = oracle_greedy(model, watched, 16)
    for _ in range(20):
        others = [tokens(rng.randrange(1, 90), rng.random()) for _ in range(rng.randrange(16))]  # type: ignore[arg-type]
        assert _round(model, [watched, *others], rng, 16)[0] == expected


def test_sampling_does_not_depend_on_the_batch() -> None:
    model, params = tiny_rand(9), SamplingParams(temperature=1.2, top_p=0.95, seed=42, repetition_penalty=1.2)
    alone = Harness(model).generate(tokens(30), 20, params=params, choice=1)
    harness = Harness(model)
    lines = [harness.line(tokens(30), params, choice) for choice in (0, 1, 2)]
    while len(lines[1].tokens) < 50:
        harness.step([(line, None) for line in lines])
    assert lines[1].tokens[30:] == alone
    assert len({tuple(line.tokens) for line in lines}) == 3


def test_from_previous_and_reopened_slots() -> None:
    model, prompt = tiny_rand(3), tokens(5)
    expected = oracle_greedy(model, prompt, 6)
    harness = Harness(model)
    line = harness.line(prompt)
    harness.step([(line, None)])
    while len(line.tokens) < 8:
        row = harness.row(line)
        row = Row(sequence=row.sequence, tokens=[FROM_PREVIOUS], position=row.position, pages=row.pages, sampling=row.sampling)
        out = harness.executor.submit(StepInputs(step=9, rows=[row])).rows[0]
        line.tokens.append(out.tokens[0].id)
        line.cached += 1
    assert line.tokens[5:] == expected[:3]
    # preempted: all is recomputed, with the output so far given back
    assert harness.generate(prompt, 6, output=expected[:3]) == expected


def test_copies_are_done_before_the_step() -> None:
    model, given = tiny_rand(3), tokens(20)
    harness = Harness(model)
    line = harness.line(given)
    harness.step([(line, None)])
    copied = [harness.free[0].pop(), harness.free[0].pop()]
    copies = [(0, source, target) for source, target in zip(line.pages[0], copied, strict=True)]
    other = harness.line([*given, 7])
    row = Row(sequence=99, tokens=[7], position=20, pages=[copied], sampling=other.slot.slot)
    out = harness.executor.submit(StepInputs(step=5, rows=[row], opened=[other.slot], copies=copies)).rows[0]
    assert out.tokens[0].id == oracle_greedy(model, [*given, 7], 1)[0]
    line.tokens[20:] = [8]  # the source pages are as they were
    assert harness.step([(line, None)])[0].tokens[0].id == oracle_greedy(model, [*given, 8], 1)[0]


@pytest.mark.parametrize("window", [None, 8])
def test_each_path_of_a_draft_tree_equals_plain_decoding(window: int | None) -> None:
    model, given = tiny_rand(6, window=window), tokens(30)
    tree, drafts = [-1, 0, 0, 2, -1, 4, 3], tokens(7, 5)
    harness = Harness(model)
    harness.poison()
    line = harness.line([*given, *drafts])
    harness.logits(Line(line.id, line.slot, line.pages, given[:28]))
    line.cached = 28
    got = forward(harness.executor, harness.row(line, tree=tree))
    for i in range(len(tree)):
        path, at = [], i
        while at >= 0:
            path.insert(0, drafts[at])
            at = tree[at]
        torch.testing.assert_close(got[2 + i], oracle_logits(model, [*given, *path])[-1], atol=1e-10, rtol=0)
    torch.testing.assert_close(got[:2], oracle_logits(model, given)[28:], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("kv_dtype", "within"), [("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.4), ("int8", 0.4)])
def test_narrow_caches_stay_close(kv_dtype: Any, within: float) -> None:
    model, given = tiny_rand(5), tokens(60)
    harness = Harness(model, dtype="float32", kv_dtype=kv_dtype)
    got = harness.logits(harness.line(given), 7)
    assert (got - oracle_logits(model, given)).abs().max() < within


def test_bfloat16_weights_stay_close() -> None:
    model, given = tiny_rand(5), tokens(40)
    harness = Harness(model, dtype="bfloat16")
    got = harness.logits(harness.line(given))
    assert got.dtype == torch.float32
    assert (got - oracle_logits(model, given)).abs().mean() < 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_bad_logits_fails_alone(bad: float) -> None:
    model, prompts = tiny_rand(3), [tokens(20, 1), tokens(5, 2), tokens(33, 3)]
    harness = Harness(model)
    lines = [harness.line(p) for p in prompts]
    harness.step([(line, None) for line in lines])
    for plane in harness.executor._planes[0].values():
        plane[lines[1].pages[0][0], :3] = bad
    outputs = harness.step([(line, None) for line in lines])
    assert "NaN" in outputs[1].error and not outputs[1].tokens
    for i in (0, 2):
        assert lines[i].tokens[len(prompts[i]) :] == oracle_greedy(model, prompts[i], 2)
        assert not outputs[i].error


def test_pages_of_a_failed_row_may_be_used_again() -> None:
    model, given = tiny_rand(3), tokens(17)
    for kv_dtype in ("float64", "int8"):
        harness = Harness(model, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        clean = harness.generate(given, 8)
        harness = Harness(model, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        harness.poison()
        assert harness.generate(given, 8) == clean


class _FailingOps(ReferenceOps):
    """Runs until told to fail, then raises in the middle of a step."""

    failing = False

    def logits(self, x: Any, head: Linear, scale: float, softcap: float | None, slots: Any) -> Any:
        if self.failing:
            raise RuntimeError("the device said no")
        return ReferenceOps.logits(x, head, scale, softcap, slots)


def test_a_failed_step_can_be_submitted_again() -> None:
    model, prompt = tiny_rand(3), tokens(9)
    ops = _FailingOps()
    harness = Harness(model, options={"ops": ops})
    line = harness.line(prompt)
    for failing in (True, False, True, False):
        ops.failing = failing
        if failing:
            with pytest.raises(RuntimeError):
                harness.step([(line, None)])
        else:
            harness.step([(line, None)])
    assert line.tokens[9:] == oracle_greedy(model, prompt, 2)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no tokens": ({"tokens": []}, {}),
    "a token beyond the vocabulary": ({"tokens": [320]}, {}),
    "a negative token": ({"tokens": [3, -2]}, {}),
    "too few pages": ({"position": 32}, {}),
    "a page beyond the pool": ({"pages": [[256, 1]]}, {}),
    "no page where one is needed": ({"pages": [[NO_PAGE, 1]]}, {}),
    "a negative position": ({"position": -1}, {}),
    "page lists of two groups": ({"pages": [[0, 1], [0, 1]]}, {}),
    "a closed slot": ({"sampling": 4}, {}),
    "a continuation of nothing": ({"tokens": [FROM_PREVIOUS]}, {}),
    "an adapter": ({"adapter": 1}, {}),
    "a short mask": ({"mask": b"\0"}, {}),
    "a tree without a plain token": ({"tree": [-1, 0, 1]}, {}),
    "a child before its parent": ({"tree": [1, -1]}, {}),
    "a slot out of range": ({}, {"opened": [SamplingSlot(slot=64, params=GREEDY, choice=0, prompt=[1])]}),
    "a prompt beyond the vocabulary": ({}, {"opened": [SamplingSlot(slot=3, params=GREEDY, choice=0, prompt=[320])]}),
    "a negative temperature": (
        {},
        {"opened": [SamplingSlot(slot=3, params=SamplingParams(temperature=-1.0), choice=0, prompt=[1])]},
    ),
    "a copy beyond the pool": ({}, {"copies": [(0, 1, 256)]}),
    "a copy in no group": ({}, {"copies": [(1, 1, 2)]}),
    "two copies to one page": ({}, {"copies": [(0, 30, 32), (0, 31, 32)]}),
    "a copy of a page that a copy changes": ({}, {"copies": [(0, 30, 31), (0, 31, 32)]}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_inputs_are_refused_and_change_nothing(case: str) -> None:
    harness = Harness(tiny_rand(3))
    line = harness.line(tokens(9))
    harness.step([(line, None)])
    before = [plane.clone() for plane in harness.executor._planes[0].values()]
    slots = dict(harness.executor._slots)
    row = {"sequence": 5, "tokens": [1, 2, 3], "position": 0, "pages": [[20, 21]], "sampling": 3} | REFUSED[case][0]
    slot = SamplingSlot(slot=3, params=GREEDY, choice=0, prompt=[1, 2, 3])
    inputs = {"step": 2, "rows": [Row(**row)], "opened": [slot]} | REFUSED[case][1]
    with pytest.raises(InvalidRequest):
        harness.executor.submit(StepInputs(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(before, harness.executor._planes[0].values(), strict=True))
    assert harness.executor._slots == slots


def test_closing_a_slot_frees_it() -> None:
    harness = Harness(tiny_rand(3))
    line = harness.line(tokens(9))
    harness.step([(line, None)])
    harness.executor.submit(StepInputs(step=2, rows=[], closed=[line.slot.slot]))
    with pytest.raises(InvalidRequest):
        harness.step([(line, None)])


def test_kept_logits_are_of_every_token_and_change_nothing() -> None:
    """Two rows, one sampled in mid-step: what is kept is float32 [T, V] in the step's order, and the token drawn is the same."""
    model = tiny_rand(6)
    plain, keeping = (Harness(model, "float32") for _ in range(2))
    keeping.executor.keep_logits(True)
    drawn = []
    for harness in (plain, keeping):
        rows = [harness.row(harness.line(tokens(9, 1))), harness.row(harness.line(tokens(5, 2)), 4)]
        opened = [SamplingSlot(slot=rows[0].sampling, params=GREEDY, choice=0, prompt=tokens(9, 1))]
        outputs = harness.executor.submit(StepInputs(step=1, rows=rows, opened=opened))
        drawn.append([[token.id for token in row.tokens] for row in outputs.rows])
    assert drawn[0] == drawn[1] and len(drawn[0][0]) == 1 and drawn[0][1] == []
    assert plain.executor.logits() == b""
    kept = torch.frombuffer(bytearray(keeping.executor.logits()), dtype=torch.float32).view(13, 320)
    expected = torch.cat([oracle_logits(model, tokens(9, 1)), oracle_logits(model, tokens(5, 2)[:4])])
    torch.testing.assert_close(kept, expected.float(), atol=1e-3, rtol=1e-4)
    keeping.executor.keep_logits(False)
    assert keeping.executor.logits() == b""
