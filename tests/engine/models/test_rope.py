"""RoPE frequencies against transformers' own functions, and what is refused. Logits at long positions: test_checkpoints.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModel
from engine.models.rope import resolve_rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "llama3", "factor": 32.0, **LLAMA3, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", **LONG, "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32, "attention_factor": 1.1},
]


def config(scaling: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 128, "rope_theta": 10000.0, "rope_scaling": scaling, **keys}


@pytest.mark.parametrize("context", [None, 100, 512])
@pytest.mark.parametrize("scaling", KINDS, ids=lambda s: s["rope_type"])
def test_equals_transformers(scaling: dict[str, Any], context: int | None) -> None:
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=10000.0,
        rope_scaling=dict(scaling),
    )
    frequencies, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=context or 128)
    for given in (config(scaling), {"max_position_embeddings": 128, "rope_parameters": {**scaling, "rope_theta": 10000.0}}):
        ours = resolve_rope(given, 16, context)
        assert ours.spec.kind == scaling["rope_type"]
        assert ours.spec.inverse_frequencies == pytest.approx(frequencies.tolist(), rel=2e-6)
        assert ours.spec.attention_factor == pytest.approx(attention, rel=1e-12)


def test_default_is_the_plain_series() -> None:
    spec = resolve_rope(config(rope_theta=500000.0), 128, None).spec
    assert spec.inverse_frequencies == pytest.approx([500000.0 ** (-i / 128) for i in range(0, 128, 2)], rel=1e-15)
    assert spec.attention_factor == 1.0 and spec.dim == 128


@pytest.mark.parametrize("keys", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partial_rotary_turns_the_first_dimensions(keys: dict[str, Any]) -> None:
    spec = resolve_rope({"max_position_embeddings": 128, "rope_theta": 10000.0, **keys}, 16, None).spec
    assert spec.dim == 8
    assert spec.inverse_frequencies == resolve_rope(config(), 8, None).spec.inverse_frequencies


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_partial_rotary_under_scaling_equals_transformers(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    theirs = LlamaConfig(head_dim=16, max_position_embeddings=128, rope_scaling={**scaling, "partial_rotary_factor": 0.5})
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    ours = resolve_rope(config(scaling, partial_rotary_factor=0.5), 16, None).spec
    assert ours.dim == 8
    assert ours.inverse_frequencies == pytest.approx(frequencies.tolist(), rel=2e-6)


def test_gguf_factors_equal_llama3_scaling() -> None:
    """A GGUF file has Llama 3's scaling as divisors of the plain frequencies."""
    plain = resolve_rope(config(), 16, None).spec.inverse_frequencies
    scaled = resolve_rope(config(KINDS[7]), 16, None).spec.inverse_frequencies
    factors = [p / s for p, s in zip(plain, scaled, strict=True)]
    assert len({round(f, 3) for f in factors}) > 2
    assert resolve_rope(config(rope_freq_factors=factors), 16, None).spec.inverse_frequencies == pytest.approx(scaled, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 512),
    ],
)
def test_context_is_what_the_scaling_makes_it(scaling: dict[str, Any] | None, expected: int) -> None:
    assert resolve_rope(config(scaling), 16, None).context_tokens == expected


def test_what_depends_on_the_context_is_said() -> None:
    assert "512 tokens" in resolve_rope(config(KINDS[1]), 16, 512).notes[0]
    assert "the long factors" in resolve_rope(config(KINDS[9]), 16, 33).notes[0]
    assert "the short factors" in resolve_rope(config(KINDS[9]), 16, 32).notes[0]
    assert resolve_rope(config(KINDS[0]), 16, 512).notes == ()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}, "mystery"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, "alpha"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", **LONG, "long_factor": [1.0]}}, "long_factor"),
        ({"rope_scaling": {"rope_type": "longrope", **LONG, "short_factor": [0.0] * 8}}, "short_factor"),
        ({"rope_scaling": KINDS[0], "rope_parameters": KINDS[1]}, "disagree"),
        ({"rope_freq_factors": [1.0]}, "rope_freq_factors"),
        ({"rope_freq_factors": [1.0] * 8, "rope_scaling": KINDS[0]}, "linear"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast"),
        ({"partial_rotary_factor": 0.3125}, "5 of 16"),
        ({"partial_rotary_factor": 1.5}, "24 of 16"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_refuses_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        resolve_rope({"max_position_embeddings": 128, **keys}, 16, None)
