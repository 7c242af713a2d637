"""GGUF metadata and tensors against the Hugging Face checkpoint they came from: the same config, the same bits (both ways)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import CavectlError, CorruptFile, UnsupportedModel
from engine.models.families import family_for
from engine.weights.gguf_arch import shortest_decimal
from engine.weights.gguf_source import GgufSource
from engine.weights.source import open_source
from tests.fixtures.gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U16,
    U32,
    Array,
    Key,
    Layout,
    TensorRow,
    byte_vocabulary,
    gguf_bytes,
    llama3_factors,
    llama_gguf,
    tensor_row,
)
from tests.fixtures.tiny_rand import TinyRand, tiny_rand

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 8, "kv_heads": 2},
    "one key-value head": {"heads": 4, "kv_heads": 1},
    "all heads": {"heads": 4, "kv_heads": 4},
    "tied": {"tied": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"window": 8},
    "half": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "linear rope": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "three layers": {"layers": 3},
}


def write(folder: Path, layout: Layout) -> str:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(layout))
    return str(path)


def layout_of(model: TinyRand, *extra: Key) -> Layout:
    return llama_gguf(model.config, model.tensors, extra)


def rope_keys(scaling: dict[str, Any] | None) -> Sequence[Key]:
    if not scaling:
        return ()
    return (
        Key("llama.rope.scaling.type", STRING, scaling["rope_type"]),
        Key("llama.rope.scaling.factor", F32, scaling["factor"]),
    )


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_both_formats_give_the_same_model_to_the_bit(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = tiny_rand(seed=3, **variant)
    folder = open_source(str(model.save(tmp_path / "folder")), "safetensors")
    file = open_source(write(tmp_path, layout_of(model, *rope_keys(model.config["rope_scaling"]))), "gguf")
    family = family_for(folder.info.architecture)
    assert file.info.architecture == folder.info.architecture
    assert family.spec(file.info.config, None) == family.spec(folder.info.config, None)
    assert file.tensors.keys() == folder.tensors.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        theirs, ours = folder.load(name), file.load(name)
        assert torch.equal(theirs, tensor)
        assert ours.shape == tensor.shape == file.tensors[name].shape
        assert torch.equal(ours.to(tensor.dtype), tensor), name
        assert ours.dtype == (tensor.dtype if tensor.ndim > 1 else torch.float32)
    for source in (folder, file):
        assert source.info.parameters == sum(t.numel() for t in model.tensors.values())
        assert (source.info.layers, source.info.vocab_size) == (model.config["num_hidden_layers"], 320)
        source.close()


def test_llama3_scaling_comes_as_frequency_factors(tmp_path: Path) -> None:
    model = tiny_rand(rope=LLAMA3)
    layout = layout_of(model)
    factors = llama3_factors(model.config["head_dim"], model.config["rope_theta"], LLAMA3)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    layout = replace(layout, tensors=(tensor_row("rope_freqs.weight", factors), *layout.tensors))
    source = GgufSource(write(tmp_path, layout))
    assert source.info.config["rope_freq_factors"] == factors.tolist()
    assert source.tensors.keys() == model.tensors.keys()
    family = family_for("llama")
    ours = family.spec(source.info.config, None).layers[0].mixer.rope
    theirs = family.spec(model.config, None).layers[0].mixer.rope
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(ours.inverse_frequencies, theirs.inverse_frequencies, rtol=1e-7)
    source.close()


@pytest.mark.parametrize(
    "row",
    [
        tensor_row("rope_freqs.weight", torch.ones(7)),
        tensor_row("rope_freqs.weight", torch.zeros(8)),
        tensor_row("rope_freqs.weight", torch.tensor([float("inf")] * 8)),
        tensor_row("rope_freqs.weight", torch.tensor([float("nan")] * 8)),
        tensor_row("rope_freqs.weight", torch.ones(8, dtype=torch.float16)),
    ],
)
def test_frequency_factors_that_cannot_be_are_corrupt(tmp_path: Path, row: TensorRow) -> None:
    layout = layout_of(tiny_rand())
    with pytest.raises(CorruptFile, match="rope_freqs"):
        GgufSource(write(tmp_path, replace(layout, tensors=(*layout.tensors, row))))


def test_yarn(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    keys = (*rope_keys(scaling), Key("llama.rope.scaling.original_context_length", U32, 128))
    source = GgufSource(write(tmp_path, layout_of(tiny_rand(), *keys)))
    assert source.info.config["rope_scaling"] == scaling
    source.close()


def test_sizes_as_arrays_that_agree(tmp_path: Path) -> None:
    layout = layout_of(tiny_rand())
    keys = [key for key in layout.keys if "head_count" not in str(key.name)]
    keys += [
        Key("llama.attention.head_count", ARRAY, Array(I32, [4, 4])),
        Key("llama.attention.head_count_kv", ARRAY, Array(U32, [2, 2])),
    ]
    source = GgufSource(write(tmp_path, replace(layout, keys=keys)))
    assert source.info.config["num_key_value_heads"] == 2
    source.close()


def test_q_and_k_without_a_count_of_key_value_heads(tmp_path: Path) -> None:
    """The key is optional: as many as query heads."""
    model = tiny_rand(heads=4, kv_heads=4)
    layout = layout_of(model)
    keys = [key for key in layout.keys if key.name != "llama.attention.head_count_kv"]
    source = GgufSource(write(tmp_path, replace(layout, keys=keys)))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(source.load(name), model.tensors[name])
    source.close()


def test_raw_gives_the_bytes_of_the_file(tmp_path: Path) -> None:
    model = tiny_rand()
    source = GgufSource(write(tmp_path, layout_of(model)))
    data, kind = source.raw("model.norm.weight")
    assert kind == "F32"
    assert bytes(data) == model.tensors["model.norm.weight"].numpy().tobytes()
    source.close()


def test_the_vocabulary_and_the_template_are_in_the_info(tmp_path: Path) -> None:
    keys = (*byte_vocabulary(320), Key("tokenizer.chat_template", STRING, "{{ x }}"), Key("general.license", STRING, "mit"))
    source = GgufSource(write(tmp_path, layout_of(tiny_rand(), *keys)))
    vocabulary = source.info.vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.bos_id, len(vocabulary.tokens)) == ("llama", 1, 320)
    assert source.info.chat_template == "{{ x }}"
    assert source.info.metadata["general.license"] == "mit"
    assert "tokenizer.chat_template" not in source.info.metadata
    assert source.info.warnings == []
    source.close()


def test_fewer_tokens_than_rows_is_a_warning_and_more_is_corrupt(tmp_path: Path) -> None:
    source = GgufSource(write(tmp_path, layout_of(tiny_rand(), *byte_vocabulary(300))))
    assert source.info.warnings == ["the vocabulary names 300 of 320 tokens"]
    source.close()
    with pytest.raises(CorruptFile, match="321 tokens"):
        GgufSource(write(tmp_path, layout_of(tiny_rand(), *byte_vocabulary(321))))


def _replace_key(layout: Layout, name: str, key: Key | None) -> Layout:
    keys = [key if at.name == name else at for at in layout.keys]
    return replace(layout, keys=[at for at in keys if at])


EPSILON = "llama.attention.layer_norm_rms_epsilon"
HEADS, KV_HEADS = "llama.attention.head_count", "llama.attention.head_count_kv"
# what is wrong: (key, its type and value or None for absent, error, what the message says)
REFUSED: dict[str, tuple[str, tuple[int, object] | None, type[CavectlError], str]] = {
    "architecture": ("general.architecture", (STRING, "gpt2"), UnsupportedModel, "'gpt2'"),
    "no architecture": ("general.architecture", None, CorruptFile, "general.architecture"),
    "architecture as a number": ("general.architecture", (U32, 1), CorruptFile, "general.architecture"),
    "10^9 layers": ("llama.block_count", (U32, 10**9), UnsupportedModel, "num_hidden_layers = 1000000000"),
    "no layers": ("llama.block_count", (U32, 0), UnsupportedModel, "num_hidden_layers = 0"),
    "layers absent": ("llama.block_count", None, UnsupportedModel, "lacks num_hidden_layers"),
    "0 heads": (HEADS, (U32, 0), UnsupportedModel, "num_attention_heads = 0"),
    "heads that do not divide the rows": (HEADS, (U32, 18), CorruptFile, "64 rows for 18 heads"),
    "hidden -1": ("llama.embedding_length", (I32, -1), UnsupportedModel, "hidden_size = -1"),
    "hidden as a boolean": ("llama.embedding_length", (BOOL, True), CorruptFile, "embedding_length"),
    "vocab 2^31": ("llama.vocab_size", (U32, 2**31), CorruptFile, "2147483648"),
    "epsilon 0": (EPSILON, (F32, 0.0), UnsupportedModel, "rms_norm_eps"),
    "epsilon NaN": (EPSILON, (F32, float("nan")), UnsupportedModel, "rms_norm_eps"),
    "theta infinite": ("llama.rope.freq_base", (F32, float("inf")), UnsupportedModel, "rope_theta"),
    "key-value heads that do not divide": (KV_HEADS, (U32, 3), UnsupportedModel, "3 key-value heads"),
    "key-value heads that differ": (KV_HEADS, (ARRAY, Array(U32, [1, 2])), UnsupportedModel, "differs between layers"),
    "partial rope": ("llama.rope.dimension_count", (U32, 8), UnsupportedModel, "dimension_count"),
    "values of another size": ("llama.attention.value_length", (U32, 8), UnsupportedModel, "value_length"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_keys_no_model_has_are_refused_by_name(
    tmp_path: Path, case: tuple[str, tuple[int, object] | None, type[CavectlError], str]
) -> None:
    name, pair, error, says = case
    with pytest.raises(error) as caught:
        GgufSource(write(tmp_path, _replace_key(layout_of(tiny_rand()), name, Key(name, *pair) if pair else None)))
    assert says in caught.value.message


@pytest.mark.parametrize(
    "key",
    [
        Key("llama.expert_count", U32, 8),
        Key("llama.attention.causal", BOOL, False),
        Key("llama.logit_scale", F32, 0.5),
        Key("llama.never.heard.of", ARRAY, Array(U32, [1])),
        Key("llama.rope.scaling.type", STRING, "longrope"),
        Key("llama.rope.scaling.attn_factor", F32, 0.5),
    ],
    ids=lambda key: key.name,
)
def test_keys_that_may_change_the_maths_are_refused_by_name(tmp_path: Path, key: Key) -> None:
    scaled = Key("llama.rope.scaling.factor", F32, 2.0)
    with pytest.raises(UnsupportedModel, match=str(key.name).replace(".", r"\.")):
        GgufSource(write(tmp_path, layout_of(tiny_rand(), key, scaled)))


def test_keys_with_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    keys = (
        Key("llama.expert_count", U32, 0),
        Key("llama.attention.causal", BOOL, True),
        Key("llama.rope.scaling.type", STRING, "none"),
        Key("llama.attention.sliding_window", U32, 0),
        Key("mistral.block_count", U32, 99),
    )
    source = GgufSource(write(tmp_path, layout_of(tiny_rand(), *keys)))
    assert source.info.architecture == "llama"
    assert "sliding_window" not in source.info.config
    source.close()


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.00.attn_q.weight", "v.patch.weight", "output.scale", "blk.0.attn_q"]
)
def test_tensors_nobody_knows_are_refused_by_name(tmp_path: Path, name: str) -> None:
    layout = layout_of(tiny_rand())
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        GgufSource(write(tmp_path, replace(layout, tensors=(*layout.tensors, tensor_row(name, torch.ones(4))))))


def test_types_nobody_unpacks_are_refused_by_name(tmp_path: Path) -> None:
    layout = layout_of(tiny_rand())
    row = TensorRow("blk.0.attn_norm.bias", (256,), 16, bytes(66))
    with pytest.raises(UnsupportedModel, match="IQ2_XXS"):
        GgufSource(write(tmp_path, replace(layout, tensors=(*layout.tensors, row))))


def test_a_file_without_an_embedding_is_corrupt(tmp_path: Path) -> None:
    layout = layout_of(tiny_rand())
    with pytest.raises(CorruptFile, match=r"token_embd\.weight is missing"):
        GgufSource(write(tmp_path, replace(layout, tensors=layout.tensors[1:])))


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="split"):
        GgufSource(write(tmp_path, layout_of(tiny_rand(), Key("split.count", U16, 2))))


def test_the_shortest_decimal_is_what_the_config_said() -> None:
    def as_float32(value: float) -> float:
        return struct.unpack("<f", struct.pack("<f", value))[0]

    for value in (1e-5, 1e-6, 10000.0, 500000.0, 0.1, 8.0, 3.0e38, 1.1754944e-38, 0.0, -2.5):
        assert shortest_decimal(as_float32(value)) == value or abs(value) > 1e38
        assert as_float32(shortest_decimal(as_float32(value))) == as_float32(value)
    rng = np.random.default_rng(0)
    for number in rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32):
        if np.isfinite(number):
            assert as_float32(shortest_decimal(float(number))) == float(number)
    assert shortest_decimal(1e-5) == 1e-5  # a float64 stays what it is
