"""The Llama family's reading of real configs, its parameter names against transformers', and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from engine.errors import UnsupportedModel
from engine.kernels.reference import ReferenceOps
from engine.models.decoder import Decoder
from engine.models.families import family_for
from engine.models.families.llama import parameters, spec
from tests.fixtures.tiny_rand import tiny_rand

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def tiny(**keys: Any) -> dict[str, Any]:
    return {k: v for k, v in {**tiny_rand().config, **keys}.items() if v != "absent"}


def test_smollm2() -> None:
    found = spec(SMOLLM2, None)
    mixer = found.layers[0].mixer
    assert (found.vocab_size, found.hidden, len(found.layers), found.context_tokens) == (49152, 576, 30, 8192)
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.window) == (9, 3, 64, None)
    assert mixer.scale == 1 / 8 and mixer.rope is not None and mixer.rope.inverse_frequencies[0] == 1.0
    assert mixer.rope.inverse_frequencies[1] == pytest.approx(100000 ** (-1 / 32), rel=1e-15)
    assert found.tied_embeddings and found.final_norm.epsilon == 1e-5 and found.layers[0].ffn.hidden == 1536
    assert found.notes == ()


def test_llama3_keeps_its_scaling() -> None:
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    found = spec(tiny(head_dim=16, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=scaling), 4096)
    rope = found.layers[0].mixer.rope
    assert rope is not None and rope.kind == "llama3"
    assert found.context_tokens == 262144


@pytest.mark.parametrize(("value", "window"), [(4096, 4096), (None, None), ("absent", 4096)])
def test_mistral_window(value: Any, window: int | None) -> None:
    assert spec(tiny(model_type="mistral", sliding_window=value), None).layers[0].mixer.window == window


def test_defaults_of_absent_keys() -> None:
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias")
    found = spec(tiny(**dict.fromkeys(absent, "absent")), None)
    mixer = found.layers[0].mixer
    assert (mixer.kv_heads, mixer.head_dim, mixer.qkv_bias, mixer.out_bias) == (4, 16, False, False)
    assert found.final_norm.epsilon == 1e-6 and not found.tied_embeddings and not found.layers[0].ffn.bias
    assert spec(tiny(head_dim=None), None).layers[0].mixer.head_dim == 16


def test_explicit_head_dim() -> None:
    found = spec(tiny(head_dim=24), None)
    assert found.layers[0].mixer.scale == 1 / math.sqrt(24)
    assert parameters(found)["layers.0.q"].shape == (96, 64)
    assert parameters(found)["layers.0.o"].shape == (64, 96)


def test_b31_flag_only_in_a_nested_text_config() -> None:
    nested = {"tie_word_embeddings": True}
    assert spec(tiny(text_config=nested, tie_word_embeddings="absent"), None).tied_embeddings
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        spec(tiny(text_config=nested, tie_word_embeddings=False), None)
    with pytest.raises(UnsupportedModel, match="new_trick"):
        spec(tiny(text_config={"new_trick": 2}), None)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_transformers(biases: bool, tied: bool) -> None:
    keys = {k: v for k, v in tiny(tie_word_embeddings=tied, attention_bias=biases, mlp_bias=biases).items() if k != "architectures"}
    with torch.device("meta"):
        theirs = {n: tuple(t.shape) for n, t in LlamaForCausalLM(LlamaConfig(**keys)).state_dict().items()}
    ours = parameters(spec(keys, None))
    assert {n: info.shape for info in ours.values() for n in info.names} == theirs
    assert [name for name, info in ours.items() if info.optional] == (["head"] if tied else [])
    assert list(ours).count("head") == 1


def test_mistral_parameters_are_those_of_transformers() -> None:
    keys = {k: v for k, v in tiny_rand(window=8).config.items() if k != "architectures"}
    with torch.device("meta"):
        theirs = {n: tuple(t.shape) for n, t in MistralForCausalLM(MistralConfig(**keys)).state_dict().items()}
    ours = parameters(spec(keys, None))
    assert {n: info.shape for info in ours.values() for n in info.names} == theirs


class _Recorded(dict[str, torch.Tensor]):
    """Remembers which weights were read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()


@pytest.mark.parametrize("biases", [False, True])
def test_the_decoder_reads_every_parameter(biases: bool) -> None:
    found = spec(tiny(attention_bias=biases, mlp_bias=biases), None)
    weights = _Recorded({name: torch.zeros(info.shape) for name, info in parameters(found).items()})
    Decoder(found, weights, ReferenceOps())
    assert weights.read == set(parameters(found))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sparse_attention": True}, "sparse_attention"),
        ({"logits_scaling": 8.0, "embedding_multiplier": 12.0}, "embedding_multiplier, logits_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"hidden_act": "mish"}, "mish"),
        ({"hidden_act": ["silu"]}, "silu"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "mystery"}}, "mystery"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_refuses_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec(tiny(**keys), None)


def test_what_is_off_or_private_changes_nothing() -> None:
    assert spec(tiny(new_trick=None, other_trick=False, _name_or_path="x", _flash=True), None) == spec(tiny(), None)


def test_unknown_model_types_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="qwen3"):
        family_for("qwen3")
