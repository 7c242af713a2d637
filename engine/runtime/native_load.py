"""The native backend of a load: the packed weight file, mapped, and the executor over it.

Owned here: what it needs in memory. Not here: the order of a load (load.py), packing (engine/weights). Invariant: imports neither
torch nor numpy, at once or later. Weights are pages of a file: they count as needed although the system may drop them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import platform
from engine.cache.layout import CacheLayout
from engine.errors import InvalidRequest
from engine.kernels.cpu.lib import load
from engine.models.spec import AttentionSpec
from engine.runtime.load import Progress, Reading
from engine.runtime.memory import Needs
from engine.runtime.native_executor import NativeExecutor
from engine.weights.packed import open_or_pack
from engine.weights.packed_layout import Kind, kind_of, tensor_bytes

_SAMPLER_BYTES = 24  # per vocabulary entry and thread: scores, weights and ids
_TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NativeFilled:
    executor: NativeExecutor
    weight_bytes: int
    warnings: list[str]
    isa: str


class NativeBackend:
    """Implements engine.runtime.load.Backend on the CPU. Raises NativeUnavailable where there is no library."""

    name = "cpu"

    def __init__(self) -> None:
        load()

    def needs(self, reading: Reading) -> Needs:
        isa, isas = reading.config.isa, load().isas
        if isa and isa not in isas:
            raise InvalidRequest(f"there is no instruction set {isa} here", hint=f"there are {', '.join(isas)}")
        return Needs(_packed_bytes(reading), _workspace_bytes(reading))

    def fill(self, reading: Reading, layout: CacheLayout, pages: tuple[int, ...], progress: Progress) -> NativeFilled:
        config = reading.config
        packed = open_or_pack(
            reading.source,
            reading.spec,
            reading.parameters,
            path=config.packed_path,
            digest=config.weights_digest,
            progress=progress,
        )
        try:
            executor = NativeExecutor(
                reading.spec,
                packed,
                layout,
                pages,
                kv_dtype=config.kv_dtype,
                threads=reading.threads,
                max_slots=config.max_sequences,
                isa=config.isa,
            )
        except BaseException:
            packed.close()
            raise
        progress("loading weights", 1.0)
        return NativeFilled(executor, packed.weight_bytes, list(packed.notes), config.isa or load().isas[0])

    def free_bytes(self) -> int:
        return platform.available_memory_bytes()

    def degraded(self, reading: Reading) -> list[str]:  # noqa: ARG002 (the seam's)
        return []


def _packed_bytes(reading: Reading) -> int:
    total = 0
    for parameter in reading.parameters.values():
        stored = [reading.source.tensors[name] for name in parameter.names if name in reading.source.tensors]
        if len(stored) < len(parameter.names):
            continue
        rows, columns = (1, *parameter.shape) if len(parameter.shape) == 1 else parameter.shape
        total += tensor_bytes(Kind.VECTOR_F32 if len(parameter.shape) == 1 else kind_of(stored[0].dtype), rows, columns)
    return total


def _workspace_bytes(reading: Reading) -> int:
    """An upper bound of what a step works in: activations as floats and as int8, logits, and the sums of each tile of a long
    context that several threads share."""
    spec, config = reading.spec, reading.config
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    wide = max(mixer.heads * mixer.head_dim for mixer in mixers)
    ffn = max(layer.ffn.hidden for layer in spec.layers)
    tokens = config.max_step_tokens
    activations = tokens * 4 * (3 * spec.hidden + 4 * wide + 3 * ffn)
    logits = min(config.max_sequences, tokens) * spec.vocab_size * 4 + reading.threads * spec.vocab_size * _SAMPLER_BYTES
    tiles = 2 * (config.context_tokens // _TILE_TOKENS + 1) * 4 * reading.threads * wide * 4
    return activations + logits + tiles
