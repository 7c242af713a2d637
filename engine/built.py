"""What surrounds an engine: how it is set up, what a loaded model is to its worker, and the two ways in which it gives up.

Plain data and errors; the engine itself is engine/engine.py, which the type hints below are the only ones to name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import CavectlError
from engine.types import LoadedInfo, StepResult

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.speculative.adaptive import Speculation


class EngineFailure(CavectlError):
    """The engine cannot go on. `result` ends every running sequence with this error; waiting ones are the caller's to save."""

    code = "engine_error"

    def __init__(self, result: StepResult) -> None:
        super().__init__("the engine failed and must be restarted", hint="try again; if it happens again, see the daemon's log")
        self.result = result


class NeedsReload(CavectlError):
    """What is asked cannot be had without loading the model again: its weights or RoPE tables would be others."""

    code = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine shares its time and keeps its cache; the defaults are the product's (WorkerConfig)."""

    target_step_ms: float = 50.0
    aging_s: float = 30.0
    prefix_cache: bool = True
    chat_retention_s: float = 1800.0
    rest_retention_s: float = 300.0
    accounting_interval_s: float = 1.0
    speculation: Speculation | None = None
    model: str = ""  # part of the cache's keys, like the format: what weights and cache are made of
    format: str = ""


DEFAULT_OPTIONS = EngineOptions()


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded model. `grow(context_tokens)` lets sequences be longer; raises OutOfMemory, InvalidRequest or NeedsReload."""

    engine: Engine
    info: LoadedInfo
    grow: Callable[[int], LoadedInfo] | None = None
