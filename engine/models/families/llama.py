"""The Llama family: SmolLM2, Llama 2 and 3.x (`llama`), Mistral with its sliding window (`mistral`).

Translates config keys and names; computes nothing. Every key is understood, known not to matter, or refused. Where a key is
absent its default is the one Hugging Face gives it for that model type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.rope import CONFIG_KEYS as ROPE_KEYS
from engine.models.rope import resolve_rope
from engine.models.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, ParameterInfo

_READ = ROPE_KEYS | {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "sliding_window",
    "attention_bias",
    "mlp_bias",
    "text_config",
}

# Keys that say how a model was trained, stored or is prompted, and change no logit.
_NO_MATHS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "language",
        "max_length",
        "max_sequence_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def spec(config: Mapping[str, Any], context_tokens: int | None) -> ModelSpec:
    config = _flat(config)
    _refuse_unknown(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    rope = resolve_rope(config, head_dim, context_tokens)
    window = _window(config)
    biased = _flag(config, "attention_bias")
    mixer = AttentionSpec(
        heads, kv_heads, head_dim, 1 / math.sqrt(head_dim), rope.spec, window=window, qkv_bias=biased, out_bias=biased
    )
    ffn = MlpSpec(_size(config, "intermediate_size"), _activation(config), bias=_flag(config, "mlp_bias"))
    norm = NormSpec(_epsilon(config))
    return ModelSpec(
        family=str(config["model_type"]),
        vocab_size=_size(config, "vocab_size"),
        hidden=hidden,
        layers=(LayerSpec(mixer, ffn, norm, norm),) * _size(config, "num_hidden_layers"),
        final_norm=norm,
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        context_tokens=rope.context_tokens,
        notes=rope.notes,
    )


def parameters(spec: ModelSpec) -> dict[str, ParameterInfo]:
    h, v = spec.hidden, spec.vocab_size
    found = {"embed": ParameterInfo(("model.embed_tokens.weight",), (v, h))}
    for i, layer in enumerate(spec.layers):
        m, f = layer.mixer, layer.ffn.hidden
        assert isinstance(m, AttentionSpec), "the family has attention in every layer"
        rows, kv_rows, at = m.heads * m.head_dim, m.kv_heads * m.head_dim, f"model.layers.{i}"
        linears = {
            "q": (f"{at}.self_attn.q_proj", rows, h, m.qkv_bias),
            "k": (f"{at}.self_attn.k_proj", kv_rows, h, m.qkv_bias),
            "v": (f"{at}.self_attn.v_proj", kv_rows, h, m.qkv_bias),
            "o": (f"{at}.self_attn.o_proj", h, rows, m.out_bias),
            "gate": (f"{at}.mlp.gate_proj", f, h, layer.ffn.bias),
            "up": (f"{at}.mlp.up_proj", f, h, layer.ffn.bias),
            "down": (f"{at}.mlp.down_proj", h, f, layer.ffn.bias),
        }
        for name, (theirs, out, into, bias) in linears.items():
            found[f"layers.{i}.{name}"] = ParameterInfo((f"{theirs}.weight",), (out, into))
            if bias:
                found[f"layers.{i}.{name}.bias"] = ParameterInfo((f"{theirs}.bias",), (out,))
        found[f"layers.{i}.mixer_norm"] = ParameterInfo((f"{at}.input_layernorm.weight",), (h,))
        found[f"layers.{i}.ffn_norm"] = ParameterInfo((f"{at}.post_attention_layernorm.weight",), (h,))
    found["final_norm"] = ParameterInfo(("model.norm.weight",), (h,))
    found["head"] = ParameterInfo(("lm_head.weight",), (v, h), optional=spec.tied_embeddings)
    return found


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config whose keys are (also) in a nested text_config, as one mapping. The two must not contradict each other."""
    nested = config.get("text_config") or {}
    if not isinstance(nested, Mapping):
        raise UnsupportedModel("the config's text_config is not an object")
    clash = sorted(k for k in nested.keys() & config.keys() & _READ if nested[k] != config[k])
    if clash:
        raise UnsupportedModel(f"the config and its text_config disagree on {', '.join(clash)}")
    return {**nested, **config}


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """A key that is off (null or false) changes nothing, whatever it means."""
    unknown = sorted(
        key
        for key, value in config.items()
        if not (key in _READ or key in _NO_MATHS or key.startswith("_") or value is None or value is False)
    )
    if unknown:
        raise UnsupportedModel(
            f"the config has keys that a {config.get('model_type')} model is not known to have: {', '.join(unknown)}",
            hint="they may change what the model computes, so it is not run without them",
        )


def _window(config: Mapping[str, Any]) -> int | None:
    absent = 4096 if config["model_type"] == "mistral" else None
    return None if config.get("sliding_window", absent) is None else _size(config, "sliding_window", absent)


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported", hint=f"known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UnsupportedModel(f"the config's rms_norm_eps must be a small number, not {value!r}")
    return float(value)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModel(f"the config lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"the config's {name} must be a positive integer, not {value!r}")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(f"the config's {name} must be true or false, not {value!r}")
    return bool(value)
