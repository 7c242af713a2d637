"""How much memory a model will take, and how much there is: the two numbers of the decision to load.

An estimate from the model's own facts, made before a worker exists; the worker measures again and may still refuse. Invariants: the
limit of a control group counts like the machine's own memory, whichever is smaller; a worker's cache, of which the system gives a
page only when it is written, counts as taken from the start, so that no two models are promised the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.types import ModelInfo

PROCESS_BYTES = 256 << 20  # an engine process before it has a model
REFERENCE_WEIGHT_BYTES = 4  # it computes in float32; the native backend's packed weights keep about the precision of their file
KV_BYTES = {"float32": 4, "float16": 2, "int8": 1}

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a worker keeps weights and cache in, by the settings of these names: the backend auto counts as cpu."""

    backend: str
    kv_dtype: str

    @property
    def native(self) -> bool:
        return self.backend in ("auto", "cpu")

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number in the cache."""
        return KV_BYTES.get(self.kv_dtype, KV_BYTES["float16" if self.native else "float32"])


def resident_bytes(info: ModelInfo, context_tokens: int, kept: Kept) -> int:
    """What a worker with this model and one full context is expected to hold."""
    config = info.config
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or info.embedding_length // heads)
    kv_values = 2 * info.layers * kv_heads * head_dim * context_tokens
    weights = info.weight_bytes if kept.native else info.parameters * REFERENCE_WEIGHT_BYTES
    return PROCESS_BYTES + weights + kv_values * kept.kv_bytes


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker, and the bytes of weights and cache that it may hold."""

    pid: int
    promised_bytes: int

    @property
    def untaken_bytes(self) -> int:
        """What it may still take. Pages of files do not count as taken: they are the system's to drop."""
        try:
            memory = psutil.Process(self.pid).memory_info()
        except psutil.NoSuchProcess:
            return 0
        return max(0, PROCESS_BYTES + self.promised_bytes - (memory.rss - getattr(memory, "shared", 0)))


def available_bytes(holders: Iterable[Holder] = ()) -> int:
    """Memory that can be had without swapping, and that is not promised to `holders`. Negative when too much is."""
    free = min([psutil.virtual_memory().available, *_cgroup_bytes()])
    return free - sum(holder.untaken_bytes for holder in holders)


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
