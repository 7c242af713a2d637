"""The loader: every parameter filled exactly once or nothing at all (S09, B30), tied embeddings (B31)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CavectlError, CorruptFile, UnsupportedModel
from engine.models.families import family_for
from engine.models.spec import ParameterInfo
from engine.weights.loader import load_weights
from engine.weights.source import TensorInfo, open_source
from engine.weights.tensor_set import check_tensors
from tests.fixtures.gguf_writer import gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import TinyRand, tiny_rand


def load(
    folder: Path, dtype: str = "float32", warnings: list[str] | None = None, progress: Callable[[str, float], None] | None = None
) -> dict[str, torch.Tensor]:
    source = open_source(str(folder), "safetensors" if folder.is_dir() else "gguf")
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, None)
        warn = [] if warnings is None else warnings
        report = progress or (lambda stage, fraction: None)
        return load_weights(source, spec, family.parameters(spec), dtype, "cpu", report, warn.append)
    finally:
        source.close()


def changed(model: TinyRand, tensors: Mapping[str, torch.Tensor | None] | None = None, **config: Any) -> TinyRand:
    """The model with some tensors replaced, added or (None) taken out, and some config keys replaced."""
    all_ = {**model.tensors, **(tensors or {})}
    return TinyRand({**model.config, **config}, {name: t for name, t in all_.items() if t is not None})


class CountAllocations(TorchDispatchMode):
    """Counts the bytes of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.bytes += out.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_parameter_has_its_values(tmp_path: Path, dtype: str, shards: int) -> None:
    model = tiny_rand(attention_bias=True, mlp_bias=True)
    loaded = load(model.save(tmp_path / "folder", shards), dtype)
    family = family_for("llama")
    parameters = family.parameters(family.spec(model.config, None))
    assert loaded.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(loaded[name], model.tensors[parameter.names[0]].to(getattr(torch, dtype)))


def test_what_is_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    model = tiny_rand()
    folder = model.save(tmp_path / "folder")
    loaded = load(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:  # in place: a mapping would see it
        file.write(bytes(path.stat().st_size))
    assert torch.equal(loaded["embed"], model.tensors["model.embed_tokens.weight"])


def test_several_tensors_are_stacked_on_rows(tmp_path: Path) -> None:
    model = tiny_rand()
    source = open_source(str(model.save(tmp_path / "folder")), "safetensors")
    family = family_for("llama")
    spec = family.spec(model.config, None)
    names = family.parameters(spec)
    parts = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    names = {n: p for n, p in names.items() if n not in ("layers.0.q", "layers.0.k")} | {
        "layers.0.kq": ParameterInfo(parts, (96, 64))
    }
    loaded = load_weights(source, spec, names, "float32", "cpu", lambda stage, fraction: None)
    source.close()
    assert torch.equal(loaded["layers.0.kq"], torch.cat([model.tensors[part] for part in parts]))


def test_progress_goes_up_to_one(tmp_path: Path) -> None:
    seen: list[float] = []
    load(tiny_rand().save(tmp_path / "folder"), progress=lambda stage, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert len(seen) > 10


# --- sets that do not match ----------------------------------------------------------------------------------------------------

V = "model.layers.1.self_attn.v_proj.weight"
MISMATCHES: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], type[CavectlError], str]] = {
    "one missing": ({V: None}, {}, CorruptFile, f"lacks 1 of 21 tensors: {V}"),
    "two missing": ({V: None, "model.norm.weight": None}, {}, CorruptFile, "lacks 2 of 21 tensors"),
    "a layer too few": ({}, {"num_hidden_layers": 3}, CorruptFile, "lacks 9 of 30 tensors"),
    "a layer too many": ({}, {"num_hidden_layers": 1}, UnsupportedModel, "9 tensors that this model does not use"),
    "other rows": ({V: torch.zeros(33, 64)}, {}, CorruptFile, f"{V} is [33, 64], not [32, 64]"),
    "transposed": ({V: torch.zeros(64, 32)}, {}, CorruptFile, f"{V} is [64, 32], not [32, 64]"),
    "one dimension": ({V: torch.zeros(2048)}, {}, CorruptFile, f"{V} is [2048]"),
    "no dimension": ({V: torch.tensor(1.0)}, {}, CorruptFile, f"{V} is []"),
    "vocab of another size": ({}, {"vocab_size": 321}, CorruptFile, "2 tensors do not fit"),
    "width of another size": ({}, {"hidden_size": 128}, CorruptFile, "tensors do not fit"),
    "whole numbers": ({V: torch.zeros(32, 64, dtype=torch.int8)}, {}, UnsupportedModel, f"{V} (I8)"),
    "8-bit floats": ({V: torch.zeros(32, 64).to(torch.float8_e4m3fn)}, {}, UnsupportedModel, f"{V} (F8_E4M3)"),
    "a bias nobody adds": ({V.replace("weight", "bias"): torch.zeros(32)}, {}, UnsupportedModel, "v_proj.bias"),
    "scales of a quantised variant": ({V + "_scale": torch.zeros(32)}, {}, UnsupportedModel, "v_proj.weight_scale"),
}


@pytest.mark.parametrize("case", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_set_that_does_not_match_is_refused_before_anything_is_allocated(
    tmp_path: Path, case: tuple[dict[str, torch.Tensor | None], dict[str, Any], type[CavectlError], str]
) -> None:
    tensors, config, error, says = case
    folder = changed(tiny_rand(), tensors, **config).save(tmp_path / "folder")
    with CountAllocations() as count, pytest.raises(error) as caught:
        load(folder)
    assert says in caught.value.message
    assert count.bytes == 0


@pytest.mark.parametrize(
    "key, value", [("num_hidden_layers", 10**9), ("num_attention_heads", 0), ("hidden_size", -1), ("vocab_size", 2**31)]
)
def test_impossible_configs_are_refused_before_anything_is_allocated(tmp_path: Path, key: str, value: int) -> None:
    folder = changed(tiny_rand(), None, **{key: value}).save(tmp_path / "folder")
    with CountAllocations() as count, pytest.raises(UnsupportedModel, match=key):
        load(folder)
    assert count.bytes == 0


def test_the_count_of_allocations_can_fail(tmp_path: Path) -> None:
    model = tiny_rand()
    folder = model.save(tmp_path / "folder")
    with CountAllocations() as count:
        load(folder)
    assert count.bytes >= sum(t.numel() * 4 for t in model.tensors.values())


def test_a_long_list_is_cut() -> None:
    wanted = {str(i): ParameterInfo((f"tensor.{i}",), (1,)) for i in range(100)}
    with pytest.raises(CorruptFile, match=r"lacks 99 of 100 tensors: .* and 79 more$"):
        check_tensors({"tensor.0": TensorInfo((1,), "F32", 4)}, wanted)


def test_frequencies_that_are_recomputed_may_be_there(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    assert load(changed(tiny_rand(), extra).save(tmp_path / "folder"))


# --- tied embeddings -----------------------------------------------------------------------------------------------------------


def test_tied_without_a_head_is_the_embedding(tmp_path: Path) -> None:
    loaded = load(tiny_rand(tied=True).save(tmp_path / "folder"))
    assert loaded["head"] is loaded["embed"]


def test_tied_with_the_same_head_is_stored_once(tmp_path: Path) -> None:
    model = tiny_rand(tied=True)
    warnings: list[str] = []
    again = {"lm_head.weight": model.tensors["model.embed_tokens.weight"].clone()}
    loaded = load(changed(model, again).save(tmp_path / "folder"), warnings=warnings)
    assert loaded["head"] is loaded["embed"]
    assert not warnings


def test_tied_with_another_head_is_as_transformers_does_it(tmp_path: Path) -> None:
    """The checkpoint has the last word, and it is said. The oracle is transformers itself."""
    from transformers import AutoModelForCausalLM

    head = tiny_rand(seed=5).tensors["lm_head.weight"]
    folder = changed(tiny_rand(tied=True), {"lm_head.weight": head}).save(tmp_path / "folder")
    warnings: list[str] = []
    loaded = load(folder, warnings=warnings)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
    assert torch.equal(theirs, head)
    assert torch.equal(loaded["head"], theirs)
    assert len(warnings) == 1
    assert "head of its own" in warnings[0]


def test_another_head_is_logged_when_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = changed(tiny_rand(tied=True), {"lm_head.weight": torch.zeros(320, 64)})
    source = open_source(str(model.save(tmp_path / "folder")), "safetensors")
    family = family_for("llama")
    spec = family.spec(model.config, None)
    load_weights(source, spec, family.parameters(spec), "float32", "cpu", lambda stage, fraction: None)
    source.close()
    assert [record.message for record in caplog.records if "head of its own" in record.message]


def test_untied_without_a_head_is_corrupt(tmp_path: Path) -> None:
    folder = changed(tiny_rand(), {"lm_head.weight": None}).save(tmp_path / "folder")
    with pytest.raises(CorruptFile, match=r"lacks 1 of 21 tensors: lm_head\.weight"):
        load(folder)


def test_the_flag_may_stand_in_a_nested_text_config_only(tmp_path: Path) -> None:
    model = tiny_rand(tied=True)
    folder = model.save(tmp_path / "folder")
    config = {key: value for key, value in model.config.items() if key != "tie_word_embeddings"}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"tie_word_embeddings": True}}))
    loaded = load(folder)
    assert loaded["head"] is loaded["embed"]
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"tie_word_embeddings": False}}))
    with pytest.raises(CorruptFile, match=r"lm_head\.weight"):
        load(folder)


def test_a_config_may_stand_in_a_nested_text_config_whole(tmp_path: Path) -> None:
    model = tiny_rand()
    folder = model.save(tmp_path / "folder")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": dict(model.config)}))
    assert torch.equal(load(folder)["head"], model.tensors["lm_head.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_is_tied_when_it_has_no_output(tmp_path: Path, tied: bool) -> None:
    model = tiny_rand(tied=tied)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors)))
    loaded = load(path)
    assert (loaded["head"] is loaded["embed"]) == tied


def test_the_real_model_loads(real_model_path: Path) -> None:
    loaded = load(real_model_path)
    assert loaded["embed"].shape == (49_152, 576)
    assert sum(t.numel() for name, t in loaded.items() if name != "head") == 134_515_008
    assert all(t.isfinite().all() for t in loaded.values())


def test_single_and_sharded_give_the_same(tmp_path: Path) -> None:
    one, three = load(tiny_rand().save(tmp_path / "one")), load(tiny_rand().save(tmp_path / "three", 3))
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_a_later_save_over_one_shard_is_noticed(tmp_path: Path) -> None:
    folder = tiny_rand().save(tmp_path / "folder", 2)
    save_file({"other": torch.zeros(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptFile, match="tensors are not in the file"):
        load(folder)
