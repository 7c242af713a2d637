"""The reference backend of a load: weights as torch tensors on a device, the executor over them.

Owned here: what it needs in memory and that its device is there. Not here: the order of a load (load.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine import platform
from engine.cache.layout import CacheLayout
from engine.errors import CavectlError
from engine.runtime.load import Progress, Reading
from engine.runtime.memory import Needs, reference_needs
from engine.runtime.torch_executor import TorchExecutor
from engine.weights.loader import load_weights


@dataclass(frozen=True, slots=True)
class TorchFilled:
    executor: TorchExecutor
    weight_bytes: int
    warnings: list[str]
    isa: str = ""


class TorchBackend:
    """Implements engine.runtime.load.Backend on one device. Raises device_unavailable when there is none of that name."""

    name = "reference"

    def __init__(self, device: str) -> None:
        if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise CavectlError(f"there is no device {device} here", hint="use the device cpu", code="device_unavailable")
        self._device = device

    def needs(self, reading: Reading) -> Needs:
        return reference_needs(reading.spec, reading.parameters, reading.source.tensors, reading.config)

    def fill(self, reading: Reading, layout: CacheLayout, pages: tuple[int, ...], progress: Progress) -> TorchFilled:
        config, spec = reading.config, reading.spec
        torch.set_num_threads(reading.threads)
        warnings: list[str] = []
        weights = load_weights(reading.source, spec, reading.parameters, config.dtype, self._device, progress, warnings.append)
        executor = TorchExecutor(
            spec,
            weights,
            layout,
            pages,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,  # pyright: ignore[reportArgumentType] (resolved: no longer "auto")
            device=self._device,
            max_slots=config.max_sequences,
        )
        return TorchFilled(executor, _resident_bytes(weights.values()), warnings)

    def free_bytes(self) -> int:
        return platform.available_memory_bytes() if self._device == "cpu" else torch.cuda.mem_get_info(self._device)[0]

    def degraded(self, reading: Reading) -> list[str]:
        info = reading.source.info
        if info.format == "gguf" and info.quantization not in ("F32", "F16", "BF16"):
            return [f"{info.quantization} weights are unpacked to {reading.config.dtype} in memory"]
        return []


def _resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, shared ones once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())
