"""Which files make a model: selectors, defaults, splits, shards, pickles."""

from __future__ import annotations

import json

import pytest

from daemon.store.selection import INDEX, check_index, choose_files, weights_entry
from engine.errors import CavectlError

GGUFS = ["m-IQ4_XS.gguf", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "README.md"]


@pytest.mark.parametrize(
    ("selector", "file"),
    [
        ("latest", "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("M-q8_0.GGUF", "m-Q8_0.gguf"),
    ],
)
def test_selector(selector: str, file: str) -> None:
    assert choose_files(GGUFS, selector) == (file,)


@pytest.mark.parametrize("selector", ["Q4_K", "Q4", "F16", "Q4_XS", "8_0", "main", ".*", "README.md"])
def test_selector_that_fits_nothing(selector: str) -> None:
    with pytest.raises(CavectlError) as caught:
        choose_files(GGUFS, selector)
    assert caught.value.code == "hub_not_found" and "m-Q8_0.gguf" in caught.value.hint


def test_two_that_fit_are_named() -> None:
    with pytest.raises(CavectlError) as caught:
        choose_files(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")
    assert "a-Q8_0.gguf, b-Q8_0.gguf" in caught.value.hint


def test_defaults() -> None:
    assert choose_files(["only-Q3_K_L.gguf"]) == ("only-Q3_K_L.gguf",)
    assert choose_files(["sub/m-q4_0.gguf", "m-q8_0.gguf", "config.json", "model.safetensors"]) == ("sub/m-q4_0.gguf",)
    with pytest.raises(CavectlError, match="clear choice"):
        choose_files(["a-Q3_K_L.gguf", "b-Q2_K.gguf"])


def test_folder_named_by_quant() -> None:
    assert choose_files(["Q2_K/m.gguf", "Q6_K/m.gguf"], "Q6_K") == ("Q6_K/m.gguf",)


def test_split_is_refused() -> None:
    names = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    for selector in ("latest", "Q4_K_M", names[0]):
        with pytest.raises(CavectlError) as caught:
            choose_files(names, selector)
        assert caught.value.code in ("unsupported_model", "hub_not_found")
    with pytest.raises(CavectlError, match="split GGUF"):
        choose_files(names, names[0])


def test_folder() -> None:
    names = [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "x.py",
        "sub/config.json",
    ]
    assert choose_files(names) == ("config.json", "tokenizer.json", "model.safetensors")
    assert weights_entry(choose_files(names)) == ""
    assert choose_files(["config.json", "weights.safetensors"]) == ("config.json", "weights.safetensors")
    for bad in (["model.safetensors"], ["config.json"], ["config.json", "a.safetensors", "b.safetensors"], []):
        with pytest.raises(CavectlError):
            choose_files(bad)


def test_shards() -> None:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    names = ["config.json", INDEX, *shards, "consolidated.safetensors"]
    assert choose_files(names) == ("config.json", INDEX, *shards)
    with pytest.raises(CavectlError, match=r"model-00002-of-00003\.safetensors"):
        choose_files([name for name in names if name != shards[1]])


def test_index_names_all_missing() -> None:
    data = json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "z.safetensors"}}).encode()
    check_index(data, ["x.safetensors", "y.safetensors", "z.safetensors"])
    with pytest.raises(CavectlError, match=r"2 of 3 .* x.safetensors, z.safetensors"):
        check_index(data, ["y.safetensors"])
    for bad in (b"", b"[]", b'{"weight_map": {"a": 1}}', b"[" * 100_000, b'{"weight_map": {"a": "../../etc/passwd"}}'):
        with pytest.raises(CavectlError):
            check_index(bad, [])
