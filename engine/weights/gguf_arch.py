"""What each GGUF architecture's keys and tensor names are in a Hugging Face checkpoint: one table per architecture.

Owned here: the translation of metadata to config.json keys, of tensor names, and which rows are stored in another order. Not
here: what the config means (engine/models/families) and reading bytes (gguf.py). Invariant: what a key says is translated, is
known to change nothing, or is refused by name. Source: the GGUF format document, and the key names its writers use.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.weights.config_checks import check_config
from engine.weights.gguf import GgufFile
from engine.weights.gguf_cursor import GgufArray

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF architecture. Keys are without the architecture's prefix, layer tensors without `blk.N.`."""

    model_type: str
    integers: Mapping[str, str]  # key -> config key
    floats: Mapping[str, str]
    neutral: Mapping[str, tuple[object, ...]]  # key -> values that change nothing
    tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    layer_prefix: str
    interleaved: Mapping[str, str]  # layer tensor whose rows pair (2i, 2i + 1) -> config key of its number of heads
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint tensor in its file. interleaved_heads: the rows of each of so many heads are stored as x0 y0 x1 y1 ...,
    where the checkpoint has all x before all y; 0 when rows are in order."""

    name: str
    interleaved_heads: int = 0


@dataclass(frozen=True, slots=True)
class Translation:
    config: dict[str, Any]
    tensors: dict[str, Stored]  # checkpoint name -> where it is


_LLAMA = Architecture(
    model_type="llama",
    integers={
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "vocab_size": "vocab_size",
    },
    floats={
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    },
    neutral={
        "attention.causal": (True,),
        "use_parallel_residual": (False,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "tensor_data_layout": ("Meta AI original pth",),
    },
    tensors={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    layer_tensors={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    layer_prefix="model.layers",
    interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    constants={"hidden_act": "silu"},
)

ARCHITECTURES: Mapping[str, Architecture] = {"llama": _LLAMA}

_SCALING_KEYS = ("type", "factor", "original_context_length", "attn_factor", "finetuned")
_HANDLED_KEYS = frozenset(
    {"rope.dimension_count", "rope.scale_linear", "attention.value_length", *(f"rope.scaling.{key}" for key in _SCALING_KEYS)}
)
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
_MODEL_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)")


def translate(file: GgufFile) -> Translation:
    """Config and tensor names of a Hugging Face checkpoint. Raises UnsupportedModel or CorruptFile, naming key or tensor."""
    name = file.scalar("general.architecture", str)
    if name is None:
        raise file.corrupt("the key general.architecture is missing")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise file.unsupported(f"the architecture {name!r} is not supported", f"supported: {', '.join(ARCHITECTURES)}")
    if (file.scalar("split.count", int) or 1) > 1:
        raise file.unsupported("is one part of a split model", "merge the parts into one file first")
    config = _Keys(file, name, architecture).config()
    return Translation(config, _tensors(file, architecture, config))


class _Keys:
    """The keys of one architecture in one file."""

    def __init__(self, file: GgufFile, name: str, architecture: Architecture) -> None:
        self._file = file
        self._prefix = name + "."
        self._architecture = architecture

    def config(self) -> dict[str, Any]:
        self._refuse_unknown()
        table = self._architecture
        config: dict[str, Any] = {"model_type": table.model_type, **table.constants}
        config |= {ours: value for key, ours in table.integers.items() if (value := self._integer(key)) is not None}
        config |= {ours: value for key, ours in table.floats.items() if (value := self._float(key)) is not None}
        config["vocab_size"] = self._vocab_size(config.get("vocab_size"))
        config["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in self._file.tensors
        self._add_window(config)
        check_config(config)
        self._add_rope(config)
        return config

    def _refuse_unknown(self) -> None:
        known = _HANDLED_KEYS | self._architecture.integers.keys() | self._architecture.floats.keys()
        for full, value in self._file.metadata.items():
            key = full.removeprefix(self._prefix)
            if key == full or key in known or value in self._architecture.neutral.get(key, ()):
                continue
            shown = "" if isinstance(value, GgufArray) else f" = {str(value)[:40]}"
            raise self._file.unsupported(f"the key {full}{shown} is not understood")

    def _integer(self, key: str) -> int | None:
        """A number, or an array that says the same number for every layer."""
        value = self._file.metadata.get(self._prefix + key)
        if not isinstance(value, GgufArray):
            return self._file.scalar(self._prefix + key, int)
        numbers = self._file.array(self._prefix + key, "u32" if value.item == "u32" else "i32") or []
        if len(set(numbers)) != 1:
            raise self._file.unsupported(f"{self._prefix}{key} differs between layers")
        return numbers[0]

    def _float(self, key: str) -> float | None:
        value = self._file.scalar(self._prefix + key, float)
        return None if value is None else shortest_decimal(value)

    def _vocab_size(self, said: int | None) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise self._file.corrupt("the tensor token_embd.weight is missing")
        rows = embedding.dims[-1]
        if said not in (None, rows):
            raise self._file.corrupt(f"{self._prefix}vocab_size is {said}, and token_embd.weight has {rows} rows")
        return rows

    def _add_window(self, config: dict[str, Any]) -> None:
        if not config.get("sliding_window"):
            config.pop("sliding_window", None)
        elif self._architecture is _LLAMA:
            config["model_type"] = "mistral"  # the same tensors; in checkpoints only this type has a window

    def _add_rope(self, config: dict[str, Any]) -> None:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        for key in ("rope.dimension_count", "attention.value_length"):
            found = self._integer(key)
            if found not in (None, head_dim):
                raise self._file.unsupported(f"{self._prefix}{key} is {found}, and heads have {head_dim} dimensions")
        scaling = self._scaling()
        if scaling:
            config["rope_scaling"] = scaling
        if ROPE_FACTORS in self._file.tensors:
            config["rope_freq_factors"] = self._rope_factors(head_dim)

    def _scaling(self) -> dict[str, Any] | None:
        kind = self._file.scalar(self._prefix + "rope.scaling.type", str)
        factor = self._float("rope.scaling.factor")
        if kind is None:
            kind, factor = "linear", factor or self._float("rope.scale_linear")
        if kind == "none" or factor in (None, 0.0, 1.0):
            return None
        if kind not in ("linear", "yarn"):
            raise self._file.unsupported(f"{self._prefix}rope.scaling.type = {kind[:40]!r} is not supported")
        if self._float("rope.scaling.attn_factor") not in (None, 1.0):
            raise self._file.unsupported(f"{self._prefix}rope.scaling.attn_factor is not understood")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        original = self._integer("rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _rope_factors(self, head_dim: int) -> list[float]:
        """Divisors of the rotary frequencies, one per pair: how the writers store Llama 3's scaling."""
        tensor = self._file.tensors[ROPE_FACTORS]
        if tensor.type.name != "F32" or tensor.dims != (head_dim // 2,):
            raise self._file.corrupt(f"{ROPE_FACTORS} is not {head_dim // 2} numbers of type F32")
        factors = list(struct.unpack(f"<{tensor.dims[0]}f", self._file.read(ROPE_FACTORS)))
        if not all(0 < factor < math.inf for factor in factors):
            raise self._file.corrupt(f"{ROPE_FACTORS} holds numbers that are not positive")
        return factors


def _tensors(file: GgufFile, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Stored]:
    heads = {stem: config.get(key, config["num_attention_heads"]) for stem, key in architecture.interleaved.items()}
    return dict(_named(file, architecture, heads))


def _named(file: GgufFile, architecture: Architecture, heads: Mapping[str, int]) -> Iterator[tuple[str, Stored]]:
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, stem, part = match.groups()
            if theirs := architecture.layer_tensors.get(stem):
                stored = Stored(name, heads.get(stem, 0))
                _check_interleaved(file, stored)
                yield f"{architecture.layer_prefix}.{layer}.{theirs}.{part}", stored
                continue
        elif (match := _MODEL_TENSOR.fullmatch(name)) and (theirs := architecture.tensors.get(match[1])):
            yield f"{theirs}.{match[2]}", Stored(name)
            continue
        raise file.unsupported(f"the tensor {name} is not understood")


def _check_interleaved(file: GgufFile, stored: Stored) -> None:
    rows = file.tensors[stored.name].dims[-1]
    if stored.interleaved_heads and rows % (2 * stored.interleaved_heads):
        raise file.corrupt(f"the tensor {stored.name} has {rows} rows for {stored.interleaved_heads} heads")


def shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 for 9.999999747378752e-06, as the config had it."""
    if not abs(value) < 1e38:  # not a number, or too near the largest float32 to round up
        return value
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.unpack("<f", struct.pack("<f", float(text)))[0] == value:
            return float(text)
    return value
