"""Refuses configs whose numbers no real model has, before anything is built or allocated from them.

Owned here: ranges of the keys that every decoder model has. Not here: what the keys mean (engine/models/families) and whether
the tensors agree with them (loader.py). Invariant: after `check_config` each size below is an integer in its range, so a spec
built from it is small, and products of sizes stay far inside 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModel

MAX_LAYERS = 1024
MAX_VOCAB = 1 << 22
# key -> smallest and largest value; a key of another config schema (absent here) is its family's affair
_SIZES: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": (1, MAX_LAYERS),
    "hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 20),
    "num_attention_heads": (1, 4096),
    "vocab_size": (1, MAX_VOCAB),
    "max_position_embeddings": (1, 1 << 28),
}
_OPTIONAL_SIZES: Mapping[str, tuple[int, int]] = {
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 4096),
    "sliding_window": (1, 1 << 28),
}
_POSITIVE_NUMBERS = ("rms_norm_eps", "rope_theta")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel naming the first key that is absent, of the wrong type, or out of range."""
    for key, limits in _SIZES.items():
        if config.get(key) is None:
            raise UnsupportedModel(f"the model's config lacks {key}")
        _check_size(key, config[key], limits)
    for key, limits in _OPTIONAL_SIZES.items():
        if config.get(key) is not None:
            _check_size(key, config[key], limits)
    for key in _POSITIVE_NUMBERS:
        if config.get(key) is not None:
            _check_positive(key, config[key])
    _check_heads(config)


def _check_size(key: str, value: object, limits: tuple[int, int]) -> None:
    low, high = limits
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UnsupportedModel(f"the model's config has {key} = {_shown(value)}, not a whole number from {low} to {high}")


def _check_positive(key: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # pyright: ignore[reportOperatorIssue] (narrowed through `number`)
        raise UnsupportedModel(f"the model's config has {key} = {_shown(value)}, not a positive number")


def _check_heads(config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(f"the model's config has {heads} heads, not a multiple of its {kv_heads} key-value heads")
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise UnsupportedModel(f"the model's config has hidden_size {config['hidden_size']}, not a multiple of its {heads} heads")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
