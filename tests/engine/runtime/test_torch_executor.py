"""TorchExecutor against TinyRand's full-recompute oracle: chunking, batching, windows, trees, faults and refused inputs."""

from __future__ import annotations

from tests.engine.runtime.harness import Harness
from tests.fixtures.tiny_rand import oracle_greedy, tiny_rand


def test_greedy_equals_the_oracle() -> None:
    model = tiny_rand(3)
    prompt = [1, 17, 200, 5, 44]
    assert Harness(model).generate(prompt, 24) == oracle_greedy(model, prompt, 24)
