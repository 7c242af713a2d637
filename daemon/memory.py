"""How much memory a model will take, and how much there is: the two numbers of the decision to load.

An estimate from the model's own facts, made before a worker exists; the worker measures again and may still refuse. Invariant: the
limit of a control group counts like the machine's own memory, whichever is smaller.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from engine.types import ModelInfo

PROCESS_BYTES = 256 << 20  # an engine process before it has a model
WEIGHT_BYTES = KV_BYTES = 4  # the reference backend computes in float32

_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes(info: ModelInfo, context_tokens: int) -> int:
    """What a worker with this model and one full context is expected to hold."""
    config = info.config
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or info.embedding_length // heads)
    kv = 2 * info.layers * kv_heads * head_dim * context_tokens * KV_BYTES
    return PROCESS_BYTES + info.parameters * WEIGHT_BYTES + kv


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return min([psutil.virtual_memory().available, *_cgroup_bytes()])


def _cgroup_bytes() -> list[int]:
    """What the control group (version 2) still allows; nothing when it sets no limit. Its file pages can be dropped."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return []
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return [max(0, int(limit) - used + int(stat.get("inactive_file", 0)))]
    except (OSError, ValueError):
        return []
