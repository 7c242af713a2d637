"""Checkpoints written by transformers for the tests, and their logits by transformers: the oracle of engine/models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.cache.layout import KvDtype, cache_layout
from engine.models.families import family_for
from engine.models.spec import ModelSpec
from engine.runtime.batch import PAGE_TOKENS, Row
from engine.runtime.torch_executor import ComputeDtype, TorchExecutor
from engine.weights.loader import load_weights
from engine.weights.source import open_source
from tests.engine.runtime.harness import forward

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def make(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that a mistake in any of them moves the logits by far more than 1e-4."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3 if "embed" in name or "lm_head" in name else 1.2 * weight.shape[1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def oracle(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32 logits at every position [n, V], in one pass."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


def load(
    folder: Path, context_tokens: int | None, dtype: ComputeDtype = "float32", kv_dtype: KvDtype = "float32"
) -> tuple[ModelSpec, TorchExecutor]:
    """The product's own way from files to an executor, with pages for 1,024 tokens."""
    source = open_source(str(folder), "gguf" if folder.suffix == ".gguf" else "safetensors")
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, context_tokens)
        weights = load_weights(source, spec, family.parameters(spec), dtype, "cpu", lambda stage, fraction: None)
    finally:
        source.close()
    layout = cache_layout(spec, kv_dtype)
    pages = [128] * len(layout.groups)
    return spec, TorchExecutor(spec, weights, layout, pages, dtype=dtype, kv_dtype=kv_dtype)


def logits(executor: TorchExecutor, tokens: Sequence[int], chunk: int = 512) -> torch.Tensor:
    """Our logits at every position, fed in chunks."""
    groups = len(executor._layout.groups)
    pages = [list(range(1, 2 + len(tokens) // PAGE_TOKENS))] * groups
    found = []
    for at in range(0, len(tokens), chunk):
        row = Row(sequence=1, tokens=list(tokens[at : at + chunk]), position=at, pages=pages)
        found.append(forward(executor, row))
    return torch.cat(found)
