from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys

import pytest

from engine.bench import workloads
from engine.bench.workloads import MIXES, Mix


def test_prompts_are_the_same_for_the_same_names_only() -> None:
    prompt = workloads.prompt(40, 1000, 7, "part", 2)
    assert len(prompt) == 40 and all(0 <= token < 1000 for token in prompt)
    assert workloads.prompt(40, 1000, 7, "part", 2) == prompt
    others = [workloads.prompt(40, 1000, *names) for names in ((8, "part", 2), (7, "other", 2), (7, "part", 3))]
    assert all(other != prompt and other[:3] != prompt[:3] for other in others)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_prompts_do_not_depend_on_the_process(hash_seed: str) -> None:
    """String hashes do, so the source of numbers must not be seeded with one."""
    code = "from engine.bench import workloads; print(workloads.prompt(6, 49152, 0, 'a'))"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == str(workloads.prompt(6, 49152, 0, "a"))


def test_a_prompt_uses_the_whole_vocabulary() -> None:
    assert set(workloads.prompt(2000, 32, 0)) == set(range(32))


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_lengths_have_the_mean_and_the_spread_that_is_told(mix: Mix) -> None:
    """Within 5 standard errors of the mean; half the mean as standard deviation, within a tenth."""
    drawn = workloads.lengths(mix, 4000, 0)
    for values, mean in zip(zip(*drawn, strict=True), (mix.prompt_tokens, mix.output_tokens), strict=True):
        assert min(values) >= 1
        assert abs(statistics.fmean(values) - mean) < 5 * 0.5 * mean / math.sqrt(len(values))
        assert statistics.stdev(values) == pytest.approx(0.5 * mean, rel=0.1)
        assert statistics.median(values) < mean, "long to the right"
    assert workloads.lengths(mix, 10, 0) == drawn[:10]
    assert workloads.lengths(mix, 10, 1) != drawn[:10]


def test_the_mixes_are_the_three_real_ones() -> None:
    assert [(mix.prompt_tokens, mix.output_tokens) for mix in MIXES] == [(217, 89), (482, 156), (3210, 412)]


def test_no_length_is_zero() -> None:
    assert {length for pair in workloads.lengths(Mix("tiny", 1, 1), 500, 0) for length in pair} >= {1, 2}
    assert min(length for pair in workloads.lengths(Mix("tiny", 1, 1), 500, 0) for length in pair) == 1
