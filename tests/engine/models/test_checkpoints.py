"""Tiny checkpoints of transformers' own making through our loader and decoder: logits within 1e-4 of transformers'.

B32: at 0, L - 1, L, 2 L and 4 L, with L the original context; here every position up to 4 L is compared. B33: beyond a window.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

from engine.runtime.batch import PAGE_TOKENS, Row, SamplingSlot, StepInputs
from engine.types import SamplingParams
from tests.engine.models.checkpoints import SIZES, load, logits, make, oracle
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama3_factors, llama_gguf, tensor_row
from tests.fixtures.tiny_rand import TinyRand, oracle_logits, tiny_rand

L = 64
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
ROPES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": L,
    },
    "longrope": {"rope_type": "longrope", **LONG, "factor": 4.0, "original_max_position_embeddings": L},
}


def tokens(count: int) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def saved(config: Any, folder: Path, **options: Any) -> PreTrainedModel:
    model = make(config)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("kind", ROPES)
def test_b32_rope_at_four_times_the_original_context(kind: str, tmp_path: Path) -> None:
    model = saved(LlamaConfig(**SIZES, rope_scaling=ROPES[kind]), tmp_path)
    given = tokens(4 * L + 1)
    expected = oracle(model, given)
    assert expected.std() > 1
    spec, executor = load(tmp_path, len(given))
    assert bool(spec.notes) == (kind in ("dynamic", "longrope"))
    got = logits(executor, given, chunk=50)
    worst = (got - expected).abs().amax(-1)
    assert worst[[0, L - 1, L, 2 * L, 4 * L]].max() < 1e-4
    assert worst.max() < 1e-4


@pytest.mark.parametrize("context", [L // 2, L])
def test_b32_longrope_within_the_original_context_takes_the_short_factors(context: int, tmp_path: Path) -> None:
    model = saved(LlamaConfig(**SIZES, rope_scaling=ROPES["longrope"]), tmp_path)
    given = tokens(context)
    assert (logits(load(tmp_path, context)[1], given) - oracle(model, given)).abs().max() < 1e-4


def test_a_wrong_frequency_would_be_seen(tmp_path: Path) -> None:
    """The comparison is sharp: dynamic RoPE fixed for half the length is off by far more than the tolerance."""
    model = saved(LlamaConfig(**SIZES, rope_scaling=ROPES["dynamic"]), tmp_path)
    given = tokens(4 * L)
    assert (logits(load(tmp_path, 2 * L)[1], given) - oracle(model, given)).abs().max() > 0.1


@pytest.mark.parametrize(
    "keys",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 24},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rms_norm_eps": 1e-2},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_llama_variants(keys: dict[str, Any], tmp_path: Path) -> None:
    model = saved(LlamaConfig(**SIZES | keys), tmp_path)
    given = tokens(80)
    assert (logits(load(tmp_path, None)[1], given, chunk=33) - oracle(model, given)).abs().max() < 1e-4


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = saved(LlamaConfig(**SIZES), tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    given = tokens(40)
    assert (logits(load(tmp_path, None)[1], given) - oracle(model, given)).abs().max() < 1e-4


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("chunk", [3, 512])
def test_b33_mistral_window_of_eight(prompt: int, chunk: int, tmp_path: Path) -> None:
    """Prefill of `prompt` tokens, then 20 greedy decodes; logits at every position, and the tokens, are transformers'."""
    model = saved(MistralConfig(**SIZES, sliding_window=8), tmp_path)
    _, executor = load(tmp_path, None)
    given = tokens(prompt)
    pages = [list(range(1, 2 + (prompt + 20) // PAGE_TOKENS))]
    slot = SamplingSlot(slot=0, params=SamplingParams(temperature=0.0), choice=0, prompt=given)
    whole, cached = list(given), 0
    while len(whole) < prompt + 20:
        some = whole[cached:][:chunk]
        sampling = 0 if cached + len(some) == len(whole) else -1
        row = Row(sequence=1, tokens=some, position=cached, pages=pages, sampling=sampling)
        output = executor.submit(StepInputs(step=1, rows=[row], opened=[slot] if not cached else [])).rows[0]
        cached += len(some)
        whole += [t.id for t in output.tokens]
    expected = oracle(model, whole)
    assert whole[prompt:] == expected[prompt - 1 : -1].argmax(-1).tolist()
    assert (logits(executor, whole, chunk) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"window": 8}, {"attention_bias": True, "mlp_bias": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b39_gguf_and_folder_give_the_same_bits(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_rand(2, dtype=dtype, **options)
    model = TinyRand(model.config, {n: t if t.dim() > 1 else t.float() for n, t in model.tensors.items()})
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors, byte_vocabulary(320))))
    folder = model.save(tmp_path / "folder", shards=2)
    given = tokens(60)
    a, b = (logits(load(path, None)[1], given) for path in (gguf, folder))
    assert torch.equal(a, b)
    torch.testing.assert_close(a.double(), oracle_logits(model, given), atol=2e-4, rtol=0)


def test_b39_llama3_scaling_in_a_gguf(tmp_path: Path) -> None:
    """There the scaling is a tensor of float32 divisors, so the frequencies are off by 1e-7."""
    scaling = {**(ROPES["llama3"] or {})}
    model = tiny_rand(2, rope=scaling)
    layout = llama_gguf(model.config, model.tensors, byte_vocabulary(320))
    factors = tensor_row("rope_freqs.weight", llama3_factors(16, 10000.0, scaling))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(replace(layout, tensors=(*layout.tensors, factors))))
    given = tokens(4 * L)
    got = logits(load(path, None)[1], given)
    assert (got - oracle_logits(model, given)).abs().max() < 1e-4


def test_mistral_without_a_window(tmp_path: Path) -> None:
    model = saved(MistralConfig(**SIZES, sliding_window=None), tmp_path)
    spec, executor = load(tmp_path, None)
    assert spec.layers[0].mixer.window is None
    given = tokens(90)
    assert (logits(executor, given) - oracle(model, given)).abs().max() < 1e-4
