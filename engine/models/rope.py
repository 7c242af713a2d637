"""Rotary position embedding: a config's keys turned into the numbers that every backend multiplies by.

Owned here: which RoPE kinds exist, the keys each reads, and their frequencies in float64. Not here: rotating anything
(kernels). Invariant: what is returned holds for the whole configured context. `dynamic` and `longrope` choose their frequencies
by sequence length; here that length is the configured context, so that a cached key never has to be rotated again.
Sources: RoFormer (2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), the Llama 3.1 model card, Hugging Face config keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.spec import RopeKind, RopeSpec

CONFIG_KEYS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_freq_factors",
        "partial_rotary_factor",
        "max_position_embeddings",
        "original_max_position_embeddings",
    }
)

Frequencies = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ResolvedRope:
    spec: RopeSpec
    context_tokens: int  # trained, or extended by the scaling
    notes: tuple[str, ...] = ()


class _Parameters:
    """The scaling keys of one config, read strictly: each key that nobody read is refused by name at the end."""

    def __init__(self, config: Mapping[str, Any], head_dim: int, context_tokens: int | None) -> None:
        old, new = (_mapping(config, name) for name in ("rope_scaling", "rope_parameters"))
        if old and new and old != new:
            raise UnsupportedModel("the config's rope_scaling and rope_parameters disagree")
        self._values = new or old
        self._read: set[str] = set()
        kind = self.text("rope_type") or self.text("type") or "default"
        if kind not in _KINDS:
            raise UnsupportedModel(f"RoPE type {kind!r} is not supported", hint=f"known types: {', '.join(_KINDS)}")
        self.kind: RopeKind = kind  # pyright: ignore[reportAttributeAccessIssue] (a key of _KINDS is a RopeKind)
        self.theta = self.number("rope_theta", _number(config, "rope_theta", 10000.0))
        partial = self.number("partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
        self.dim = int(head_dim * partial)
        if self.dim < 2 or self.dim % 2 or self.dim > head_dim:
            raise UnsupportedModel(f"RoPE over {self.dim} of {head_dim} dimensions is not possible: it rotates pairs")
        if not 1 < self.theta <= 1e15:
            raise UnsupportedModel(f"rope_theta must be above 1 and at most 1e15, not {self.theta}")
        self.trained = int(_number(config, "max_position_embeddings"))
        top_level = config.get("original_max_position_embeddings")
        within = self.number("original_max_position_embeddings", float(self.trained))
        self.original = int(within if top_level is None else _number(config, "original_max_position_embeddings"))
        if min(self.trained, self.original) < 2:
            raise UnsupportedModel("max_position_embeddings and original_max_position_embeddings must be at least 2")
        self.context = context_tokens or self.trained

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        self._read.add(name)
        return _number(self._values, name, default)

    def factor(self) -> float:
        value = self.number("factor")
        if not 1 <= value <= 1e6:
            raise UnsupportedModel(f"the RoPE factor must be from 1 to 1000000, not {value}")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise UnsupportedModel(f"the config's {name} must be positive, not {value}")
        return value

    def text(self, name: str) -> str:
        self._read.add(name)
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise UnsupportedModel(f"the config's {name} must be a string, not {value!r}")
        return value or ""

    def flag(self, name: str, default: bool) -> bool:
        self._read.add(name)
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"the config's {name} must be true or false, not {value!r}")
        return value

    def factors(self, name: str) -> Sequence[float]:
        self._read.add(name)
        return _factors(self._values, name, self.dim // 2)

    def refuse_unread(self) -> None:
        unread = sorted(k for k, v in self._values.items() if k not in self._read and v is not None)
        if unread:
            raise UnsupportedModel(f"RoPE type {self.kind!r} does not know: {', '.join(unread)}")


def resolve_rope(config: Mapping[str, Any], head_dim: int, context_tokens: int | None) -> ResolvedRope:
    """Frequencies for `context_tokens` (None: what the model was trained for). Raises UnsupportedModel, naming key or type."""
    p = _Parameters(config, head_dim, context_tokens)
    resolved = _KINDS[p.kind](p)
    p.refuse_unread()
    if config.get("rope_freq_factors") is None:
        return resolved
    if p.kind != "default":
        raise UnsupportedModel(f"the model has RoPE frequency factors and RoPE type {p.kind!r} too")
    divided = _divide(resolved.spec.inverse_frequencies, _factors(config, "rope_freq_factors", p.dim // 2))
    return ResolvedRope(RopeSpec("default", p.dim, divided), resolved.context_tokens)


def _plain(theta: float, dim: int) -> Frequencies:
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def _divide(frequencies: Frequencies, by: Sequence[float]) -> Frequencies:
    return tuple(f / d for f, d in zip(frequencies, by, strict=True))


def _default(p: _Parameters) -> ResolvedRope:
    return ResolvedRope(RopeSpec("default", p.dim, _plain(p.theta, p.dim)), p.trained)


def _linear(p: _Parameters) -> ResolvedRope:
    factor = p.factor()
    frequencies = tuple(f / factor for f in _plain(p.theta, p.dim))
    return ResolvedRope(RopeSpec("linear", p.dim, frequencies), int(p.trained * factor))


def _dynamic(p: _Parameters) -> ResolvedRope:
    factor = p.factor()
    if p.dim < 4:
        raise UnsupportedModel("dynamic RoPE needs at least 4 rotated dimensions")
    length = max(p.context, p.trained)
    stretch = (factor * length / p.trained - (factor - 1)) ** (p.dim / (p.dim - 2))
    note = f"RoPE is dynamic: fixed for a context of {length} tokens"
    spec = RopeSpec("dynamic", p.dim, _plain(p.theta * stretch, p.dim))
    return ResolvedRope(spec, int(p.trained * factor), (note,))


def _yarn(p: _Parameters) -> ResolvedRope:
    """Long wavelengths are interpolated, short ones kept, with a ramp between two dimensions (YaRN, section 3.2)."""
    factor = p.factor() if p.has("factor") else p.trained / p.original
    low, high = _yarn_bounds(p)
    frequencies = []
    for i, f in enumerate(_plain(p.theta, p.dim)):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(f / factor * interpolated + f * (1 - interpolated))
    spec = RopeSpec("yarn", p.dim, tuple(frequencies), _yarn_attention(p, factor))
    return ResolvedRope(spec, max(p.trained, int(p.original * factor)))


def _yarn_bounds(p: _Parameters) -> tuple[float, float]:
    """The pair indices where the ramp starts and ends: those that turn beta_fast and beta_slow times in the original context."""

    def pair_turning(times: float) -> float:
        return p.dim * math.log(p.original / (times * 2 * math.pi)) / (2 * math.log(p.theta))

    low = pair_turning(p.positive("beta_fast", 32.0))
    high = pair_turning(p.positive("beta_slow", 1.0))
    if p.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.dim - 1)
    return low, high + 0.001 if high == low else high


def _yarn_attention(p: _Parameters, factor: float) -> float:
    numerator, denominator = p.number("mscale", 0.0), p.number("mscale_all_dim", 0.0)
    if p.has("attention_factor"):
        return p.number("attention_factor")
    if factor <= 1:
        return 1.0
    if numerator and denominator:
        return (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _llama3(p: _Parameters) -> ResolvedRope:
    """Slow pairs are divided by the factor, fast ones kept, and those between blended by their turns in the original context."""
    factor, low, high = p.factor(), p.number("low_freq_factor"), p.number("high_freq_factor")
    if not 0 < low < high:
        raise UnsupportedModel(f"llama3 RoPE needs 0 < low_freq_factor < high_freq_factor, not {low} and {high}")
    frequencies = []
    for f in _plain(p.theta, p.dim):
        turns = p.original * f / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * kept + f / factor * (1 - kept))
    return ResolvedRope(RopeSpec("llama3", p.dim, tuple(frequencies)), max(p.trained, int(p.original * factor)))


def _longrope(p: _Parameters) -> ResolvedRope:
    factor = p.factor() if p.has("factor") else p.trained / p.original
    short, long = p.factors("short_factor"), p.factors("long_factor")
    chosen, word = (long, "long") if p.context > p.original else (short, "short")
    attention = math.sqrt(1 + math.log(factor) / math.log(p.original)) if factor > 1 else 1.0
    if p.has("attention_factor"):
        attention = p.number("attention_factor")
    note = f"RoPE is longrope: the {word} factors, fixed for a context of {p.context} tokens"
    spec = RopeSpec("longrope", p.dim, _divide(_plain(p.theta, p.dim), chosen), attention)
    return ResolvedRope(spec, max(p.trained, int(p.original * factor)), (note,))


_KINDS: Mapping[str, Callable[[_Parameters], ResolvedRope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"the config lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModel(f"the config's {name} must be a number, not {value!r}")
    return float(value)


def _mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedModel(f"the config's {name} must be an object, not {value!r}")
    return dict(value or {})


def _factors(values: Mapping[str, Any], name: str, count: int) -> list[float]:
    value = values.get(name)
    if not isinstance(value, list | tuple) or len(value) != count:
        raise UnsupportedModel(f"the config's {name} must be a list of {count} numbers")
    numbers = [_number({name: v}, name) for v in value]
    if min(numbers) <= 0:
        raise UnsupportedModel(f"the numbers of {name} must be positive")
    return numbers
