"""Whole models in the K types, quantised by llama.cpp: each tensor against the `gguf` package, the logits against a recompute."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from engine.models.families import family_for
from engine.weights.loader import load_weights
from engine.weights.source import open_source
from tests.engine.runtime.harness import Harness
from tests.fixtures.tiny_rand import TinyRand, oracle_logits, tiny_rand

DATA = Path(__file__).parents[2] / "data" / "gguf"
FILES = {"Q2_K": "Q2_K", "Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K"}
SOURCE = tiny_rand(seed=7, width=256, heads=4, kv_heads=2, ffn=256, vocab=300, dtype=torch.float16)  # what was quantised
OURS = {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"}


def path_of(name: str) -> Path:
    return DATA / f"tiny-{name.lower()}.gguf"


def unpacked(path: Path) -> TinyRand:
    """The checkpoint in the file, read and unpacked by the gguf package alone."""
    tensors = {}
    for row in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(row.data, row.tensor_type).copy())
        stem = row.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            part = OURS.get(part) or part.replace("attn_", "self_attn.").replace("ffn_", "mlp.") + "_proj"
            if part.endswith(("q_proj", "k_proj")):
                heads = SOURCE.config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
                pairs = values.view(heads, -1, 2, values.shape[1])
                values = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(values.shape)
            stem = f"model.layers.{layer}.{part}"
        else:
            stem = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[stem]
        tensors[f"{stem}.weight"] = values.float()
    return TinyRand(SOURCE.config, tensors)


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_equals_the_gguf_package_to_the_bit(name: str) -> None:
    source = open_source(str(path_of(name)), "gguf")
    want = unpacked(path_of(name))
    assert source.info.quantization == FILES[name]
    assert source.tensors.keys() == want.tensors.keys() == SOURCE.tensors.keys()
    for tensor, values in want.tensors.items():
        assert torch.equal(source.load(tensor), values), tensor
    source.close()


@pytest.mark.parametrize("name", FILES)
def test_what_was_quantised_is_still_recognisable(name: str) -> None:
    """The rows are in the right order: each is far nearer to its own row of the source than rows are to each other."""
    source = open_source(str(path_of(name)), "gguf")
    for tensor, values in SOURCE.tensors.items():
        error = (source.load(tensor) - values.float()).norm() / values.float().norm()
        assert error < 0.35, (tensor, error)
    source.close()


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_a_recompute_of_the_unpacked_weights(name: str) -> None:
    source = open_source(str(path_of(name)), "gguf")
    family = family_for(source.info.architecture)
    spec = family.spec(source.info.config, None)
    loaded = load_weights(source, spec, family.parameters(spec), "float64", "cpu", lambda stage, fraction: None)
    checkpoint = {n: loaded[ours] for ours, parameter in family.parameters(spec).items() for n in parameter.names}
    harness = Harness(TinyRand(source.info.config, checkpoint))
    source.close()
    given = [(7 * i) % 300 for i in range(40)]
    logits = harness.logits(harness.line(given))
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, oracle_logits(unpacked(path_of(name)), given), atol=1e-9, rtol=0)


def test_together_the_files_hold_every_k_type() -> None:
    found = set()
    for name in FILES:
        source = open_source(str(path_of(name)), "gguf")
        found |= {info.dtype for info in source.tensors.values()}
        source.close()
    assert found == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F32"}
