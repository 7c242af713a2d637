"""The decoder's optional parts, each against a transformers model that has it. These specs are written by hand: no family yet.

Gemma 2: post-norms, soft caps, scaled embedding, a window in every other layer (two cache groups). Qwen 3: norms of q and k.
StableLM: layer norms, a quarter of each head rotated. StarCoder 2: a feed-forward block without a gate, biases everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Gemma2Config, PreTrainedModel, Qwen3Config, StableLmConfig, Starcoder2Config

from engine.cache.layout import cache_layout
from engine.models.rope import resolve_rope
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from engine.runtime.torch_executor import TorchExecutor
from tests.engine.models.checkpoints import SIZES, logits, make, oracle

ROPE = resolve_rope({"max_position_embeddings": 64}, 16, None).spec
NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "final_norm.bias": "model.norm.bias",
}
LAYER_NAMES = {
    **{p: f"self_attn.{p}_proj" for p in "qkvo"},
    **{p: f"mlp.{p}_proj" for p in ("gate", "up", "down")},
    "mixer_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
GEMMA_NAMES = {
    **LAYER_NAMES,
    "mixer_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
STARCODER_NAMES = {**LAYER_NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"}


def weights(model: PreTrainedModel, names: Mapping[str, str] = LAYER_NAMES) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    found = {ours: state[theirs] for ours, theirs in NAMES.items() if theirs in state}
    for i in range(2):
        for ours, theirs in names.items():
            for part, suffix in (("weight", ""), ("bias", ".bias")):
                name = f"model.layers.{i}.{theirs}.{part}"
                if name in state:
                    found[f"layers.{i}.{ours}{suffix}"] = state[name]
    return found


def spec(layers: list[LayerSpec], norm: NormSpec, **fields: Any) -> ModelSpec:
    return ModelSpec("test", 320, 64, tuple(layers), norm, tied_embeddings=False, context_tokens=64, **fields)


def worst(model: PreTrainedModel, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> float:
    given = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    layout = cache_layout(spec, "float32")
    executor = TorchExecutor(spec, weights, layout, [8] * len(layout.groups))
    expected = oracle(model, given)
    assert expected.std() > 0.3
    return float((logits(executor, given, chunk=17) - expected).abs().max())


def test_gemma2_layers() -> None:
    model = make(
        Gemma2Config(
            **SIZES,
            sliding_window=8,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            tie_word_embeddings=False,
        )
    )
    norm = NormSpec(1e-6)
    layers = []
    for kind in model.config.layer_types:
        window = 8 if kind == "sliding_attention" else None
        mixer = AttentionSpec(4, 2, 16, 20**-0.5, ROPE, window=window, softcap=3.0)
        layers.append(LayerSpec(mixer, MlpSpec(96, "gelu_tanh"), norm, norm, norm, norm))
    ours = weights(model, GEMMA_NAMES)
    ours = {name: w + 1 if "norm" in name else w for name, w in ours.items()}
    found = spec(layers, norm, embedding_scale=8.0, logit_softcap=5.0)
    assert len(cache_layout(found, "float32").groups) == 2
    assert worst(model, found, ours) < 1e-4


def test_qwen3_layers() -> None:
    model = make(Qwen3Config(**SIZES, tie_word_embeddings=False))
    norm = NormSpec(1e-6)
    mixer = AttentionSpec(4, 2, 16, 0.25, ROPE, qk_norm=norm)
    layer = LayerSpec(mixer, MlpSpec(96, "silu"), norm, norm)
    assert worst(model, spec([layer] * 2, norm), weights(model)) < 1e-4


def test_stablelm_layers() -> None:
    model = make(StableLmConfig(**SIZES, partial_rotary_factor=0.25, use_qkv_bias=True))
    norm = NormSpec(1e-5, kind="layer", bias=True)
    rope = resolve_rope({"max_position_embeddings": 64, "partial_rotary_factor": 0.25}, 16, None).spec
    mixer = AttentionSpec(4, 2, 16, 0.25, rope, qkv_bias=True)
    layer = LayerSpec(mixer, MlpSpec(96, "silu"), norm, norm)
    assert rope.dim == 4
    assert worst(model, spec([layer] * 2, norm), weights(model)) < 1e-4


def test_starcoder2_layers() -> None:
    model = make(Starcoder2Config(**SIZES, use_bias=True, sliding_window=None, tie_word_embeddings=False))
    norm = NormSpec(1e-5, kind="layer", bias=True)
    mixer = AttentionSpec(4, 2, 16, 1 / math.sqrt(16), ROPE, qkv_bias=True, out_bias=True)
    layer = LayerSpec(mixer, MlpSpec(96, "gelu_tanh", gated=False, bias=True), norm, norm)
    assert worst(model, spec([layer] * 2, norm), weights(model, STARCODER_NAMES)) < 1e-4


def test_logit_scale_multiplies() -> None:
    model = make(Qwen3Config(**SIZES, tie_word_embeddings=True))
    norm = NormSpec(1e-6)
    layer = LayerSpec(AttentionSpec(4, 2, 16, 0.25, ROPE, qk_norm=norm), MlpSpec(96, "silu"), norm, norm)
    given, ours = [3, 1, 4], weights(model)
    del ours["head"]  # tied: the embedding is the head
    plain, scaled = (spec([layer] * 2, norm, logit_scale=s) for s in (1.0, 0.5))
    a, b = (logits(TorchExecutor(s, ours, cache_layout(s, "float32"), [4]), given) for s in (plain, scaled))
    torch.testing.assert_close(b, a / 2)
    torch.testing.assert_close(a, oracle(model, given), atol=1e-4, rtol=0)
