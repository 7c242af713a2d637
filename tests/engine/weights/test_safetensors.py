"""What the safetensors package wrote is read to the bit; files that lie are typed errors (S02, S08, S11, B30)."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CavectlError, CorruptFile, ModelNotFound, UnsupportedModel
from engine.weights.files import ModelFile
from engine.weights.safetensors import SafetensorsSource
from engine.weights.safetensors_header import read_header
from tests.engine.weights.test_gguf import frugal
from tests.fixtures.tiny_rand import TinyRand, tiny_rand

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_bytes(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def headed(folder: Path, content: bytes) -> ModelFile:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return ModelFile(path)


# --- one file ------------------------------------------------------------------------------------------------------------------


LIES: dict[str, tuple[bytes, type[CavectlError], str]] = {
    "empty": (b"", CorruptFile, "ends early"),
    "seven bytes": (bytes(7), CorruptFile, "ends early"),
    "header of 2^63 bytes": (file_bytes({}, length=2**63), CorruptFile, "claims a header"),
    "header of 2^64 - 1 bytes": (file_bytes({}, length=2**64 - 1), CorruptFile, "claims a header"),
    "header of 0 bytes": (file_bytes({}, length=0), CorruptFile, "claims a header"),
    "header beyond the file": (file_bytes({}, length=3), CorruptFile, "claims a header"),
    "not JSON": (file_bytes(b"{]"), CorruptFile, "not valid JSON"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), CorruptFile, "not valid JSON"),
    "a list": (file_bytes(b"[]"), CorruptFile, "not a JSON object"),
    "deep": (file_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), CorruptFile, "not valid JSON"),
    "deep objects": (file_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), CorruptFile, "not valid JSON"),
    "a number of 5,000 digits": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), CorruptFile, "not valid JSON"),
    "too many values": (file_bytes(b'{"a":[' + b"0," * 4_000_000 + b"0]}"), CorruptFile, "too many values"),
    "the same tensor twice": (file_bytes(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(8)), CorruptFile, "twice"),
    "the same field twice": (
        file_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)), CorruptFile, "twice"
    ),
    "entry that is a number": (file_bytes({"a": 1}), CorruptFile, "wrongly"),
    "entry without a shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), CorruptFile, "wrongly"),
    "entry with another field": (file_bytes({"a": {**F32, "x": 1}}, bytes(8)), CorruptFile, "wrongly"),
    "unknown dtype": (file_bytes({"a": {**F32, "dtype": "F3"}}, bytes(8)), UnsupportedModel, "'F3'"),
    "dtype that is a list": (file_bytes({"a": {**F32, "dtype": []}}, bytes(8)), UnsupportedModel, "unknown type"),
    "negative offset": (file_bytes({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)), CorruptFile, "offsets"),
    "offsets the wrong way round": (file_bytes({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)), CorruptFile, "-8 bytes"),
    "three offsets": (file_bytes({"a": {**F32, "data_offsets": [0, 8, 8]}}, bytes(8)), CorruptFile, "offsets"),
    "fractional offset": (file_bytes({"a": {**F32, "data_offsets": [0, 8.0]}}, bytes(8)), CorruptFile, "offsets"),
    "negative size": (file_bytes({"a": {**F32, "shape": [-2]}}, bytes(8)), CorruptFile, "shape"),
    "boolean size": (file_bytes({"a": {**F32, "shape": [True, 2]}}, bytes(8)), CorruptFile, "shape"),
    "sizes that overflow": (file_bytes({"a": {**F32, "shape": [2**32, 2**32, 2]}}, bytes(8)), CorruptFile, "bytes for the shape"),
    "size of 2^64": (file_bytes({"a": {**F32, "shape": [2**64]}}, bytes(8)), CorruptFile, "shape"),
    "nine dimensions": (file_bytes({"a": {**F32, "shape": [1] * 8 + [2]}}, bytes(8)), CorruptFile, "shape"),
    "bytes that are not numel * size": (file_bytes({"a": {**F32, "shape": [3]}}, bytes(8)), CorruptFile, "8 bytes"),
    "overlap": (file_bytes({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)), CorruptFile, "overlap"),
    "same place": (file_bytes({"a": F32, "b": F32}, bytes(8)), CorruptFile, "overlap"),
    "gap": (file_bytes({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)), CorruptFile, "gaps"),
    "gap at the start": (file_bytes({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)), CorruptFile, "gaps"),
    "trailing bytes": (file_bytes({"a": F32}, bytes(9)), CorruptFile, "header needs"),
    "cut by a byte": (file_bytes({"a": F32}, bytes(7)), CorruptFile, "header needs"),
    "metadata that is a list": (file_bytes({"__metadata__": [], "a": F32}, bytes(8)), CorruptFile, "__metadata__"),
    "metadata that nests": (file_bytes({"__metadata__": {"a": {}}, "a": F32}, bytes(8)), CorruptFile, "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES.values(), ids=LIES.keys())
def test_every_lie_is_a_typed_error(tmp_path: Path, case: tuple[bytes, type[CavectlError], str]) -> None:
    content, error, says = case
    file = headed(tmp_path, content)
    with frugal(), pytest.raises(error) as caught:
        read_header(file)
    file.close()
    assert says in caught.value.message


def test_every_truncation_is_corrupt(tmp_path: Path) -> None:
    whole = file_bytes({"a": F32, "b": {**F32, "data_offsets": [8, 16]}}, bytes(16))
    for length in range(len(whole)):
        file = headed(tmp_path, whole[:length])
        with pytest.raises(CorruptFile):
            read_header(file)
        file.close()


@pytest.mark.timing
def test_a_hundred_thousand_empty_tensors_take_little_time(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    file = headed(tmp_path, file_bytes({f"t{i}": empty for i in range(100_000)}))
    started = time.process_time()
    assert len(read_header(file)) == 100_000
    assert time.process_time() - started < 2.0
    file.close()


def test_every_dtype_and_shape_that_the_package_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool]
    model = tiny_rand()
    tensors = {str(d): torch.randint(0, 2, (3, 5), generator=generator).to(d) for d in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.arange(7, dtype=torch.uint8)}
    folder = model.save(tmp_path / "folder")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(folder)
    assert source.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        loaded = source.load(name)
        assert loaded.dtype == tensor.dtype
        assert loaded.shape == tensor.shape == source.tensors[name].shape
        assert bytes(source.raw(name)[0]) == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert torch.equal(loaded.float(), tensor.float())
    source.close()


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    data = torch.tensor([1.5, -2.0])
    folder = tiny_rand().save(tmp_path / "folder")
    for padding in range(4):
        header = json.dumps({"a": F32}).encode() + b" " * padding
        (folder / "model.safetensors").write_bytes(file_bytes(header, data.numpy().tobytes()))
        source = SafetensorsSource(folder)
        assert torch.equal(source.load("a"), data)
        source.close()


# --- folders and shards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_rand().save(tmp_path / "folder", shards=3)


def _index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _equals(source: SafetensorsSource, model: TinyRand) -> bool:
    return source.tensors.keys() == model.tensors.keys() and all(torch.equal(source.load(n), t) for n, t in model.tensors.items())


def test_shards_hold_what_one_file_would(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    assert _equals(source, tiny_rand())
    assert source.info.quantization == "F32"
    assert source.info.warnings == []
    source.close()


def test_absent_shards_are_all_named(sharded: Path) -> None:
    for number in (1, 3):
        (sharded / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(CorruptFile) as caught:
        SafetensorsSource(sharded)
    assert "2 of 3" in caught.value.message
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in caught.value.message


@pytest.mark.parametrize("bytes_", [1, 4096])
def test_a_cut_shard_is_corrupt(sharded: Path, bytes_: int) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-bytes_])
    with pytest.raises(CorruptFile, match=r"model-00002-of-00003.safetensors: has .* bytes where its header needs"):
        SafetensorsSource(sharded)


def test_a_stray_file_is_not_read(sharded: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "consolidated.safetensors")
    (sharded / "model.fp8.safetensors").write_bytes(b"nothing that could be read")
    source = SafetensorsSource(sharded)
    assert _equals(source, tiny_rand())
    source.close()


def test_tensors_in_no_shard_are_all_named(sharded: Path) -> None:
    _index(sharded, lambda index: index.update({f"ghost.{i}": "model-00001-of-00003.safetensors" for i in range(2)}))
    with pytest.raises(CorruptFile, match=r"2 tensors are not in the file .*: ghost.0, ghost.1"):
        SafetensorsSource(sharded)


def test_a_tensor_that_the_index_does_not_list_is_not_used(sharded: Path) -> None:
    _index(sharded, lambda index: index.pop("model.norm.weight"))
    source = SafetensorsSource(sharded)
    assert "model.norm.weight" not in source.tensors
    assert source.info.warnings == ["1 tensors are in a weight file but not in model.safetensors.index.json: they are not used"]
    source.close()


def test_a_single_file_goes_before_an_index(sharded: Path) -> None:
    model = tiny_rand(seed=9)
    save_file(dict(model.tensors), sharded / "model.safetensors")
    source = SafetensorsSource(sharded)
    assert _equals(source, model)
    source.close()


UNSAFE_NAMES = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "a\\..\\b.safetensors",
    "C:x.safetensors",
    "\\\\host\\share.safetensors",
    "a/./b.safetensors",
    "a//b.safetensors",
    "a/../b.safetensors",
    "a\0b.safetensors",
    "a\nb.safetensors",
    "\ud800.safetensors",
    "/".join("a" * 17) + ".safetensors",
    "x" * 256 + ".safetensors",
    "",
    ".",
    "model.bin",
    "a" * 100_000,
]


@pytest.mark.parametrize("name", UNSAFE_NAMES, ids=ascii)
def test_unsafe_names_in_an_index_are_refused(sharded: Path, name: str) -> None:
    _index(sharded, lambda index: index.update({"model.norm.weight": name}))
    with pytest.raises(CorruptFile, match="may not be opened"):
        SafetensorsSource(sharded)


def test_a_name_too_long_for_the_system_is_a_missing_file(sharded: Path) -> None:
    name = "/".join(["x" * 243] * 16) + ".safetensors"
    _index(sharded, lambda index: index.update({"model.norm.weight": name}))
    with pytest.raises(CorruptFile, match="1 of 4 weight files are missing"):
        SafetensorsSource(sharded)


def test_names_that_differ_in_case_only_are_refused(sharded: Path) -> None:
    _index(sharded, lambda index: index.update({"model.norm.weight": "MODEL-00001-of-00003.safetensors"}))
    with pytest.raises(CorruptFile, match="case only"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}'])
def test_an_index_of_another_shape_is_corrupt(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFile):
        SafetensorsSource(sharded)


def test_a_symbolic_link_to_a_shard_is_followed(sharded: Path, tmp_path: Path) -> None:
    """How the Hugging Face cache lays out its folders."""
    shard = sharded / "model-00001-of-00003.safetensors"
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    source = SafetensorsSource(sharded)
    assert _equals(source, tiny_rand())
    source.close()


def test_files_are_closed_when_opening_fails(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").write_bytes(bytes(100))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CorruptFile):
        SafetensorsSource(sharded)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- config.json and what else lies in a folder --------------------------------------------------------------------------------


def _config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], type[CavectlError], str]] = {
    "unknown model_type": ({"model_type": "gpt2"}, UnsupportedModel, "'gpt2'"),
    "no model_type": ({"model_type": ...}, UnsupportedModel, "no model_type"),
    "model_type that is a list": ({"model_type": ["llama"]}, UnsupportedModel, "no model_type"),
    "10^9 layers": ({"num_hidden_layers": 10**9}, UnsupportedModel, "num_hidden_layers = 1000000000"),
    "0 heads": ({"num_attention_heads": 0}, UnsupportedModel, "num_attention_heads = 0"),
    "hidden -1": ({"hidden_size": -1}, UnsupportedModel, "hidden_size = -1"),
    "vocab 2^31": ({"vocab_size": 2**31}, UnsupportedModel, "vocab_size = 2147483648"),
    "fractional layers": ({"num_hidden_layers": 2.0}, UnsupportedModel, "num_hidden_layers = 2.0"),
    "layers as text": ({"num_hidden_layers": "2"}, UnsupportedModel, "num_hidden_layers = '2'"),
    "layers as a boolean": ({"num_hidden_layers": True}, UnsupportedModel, "num_hidden_layers = True"),
    "vocab absent": ({"vocab_size": ...}, UnsupportedModel, "lacks vocab_size"),
    "context null": ({"max_position_embeddings": None}, UnsupportedModel, "lacks max_position_embeddings"),
    "text_config that is a list": ({"text_config": [1]}, CorruptFile, "text_config"),
    "a number beyond 64 bits": ({"pad_token_id": 2**70}, CorruptFile, "64-bit"),
    "half a surrogate pair": ({"_name": "\ud800"}, CorruptFile, "plain text"),
    "epsilon infinite": ({"rms_norm_eps": float("inf")}, UnsupportedModel, "rms_norm_eps"),
}


@pytest.mark.parametrize("case", CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_no_model_has_are_refused(tmp_path: Path, case: tuple[dict[str, Any], type[CavectlError], str]) -> None:
    changes, error, says = case
    with pytest.raises(error) as caught:
        SafetensorsSource(_config(tiny_rand().save(tmp_path / "folder"), **changes))
    assert says in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":1,"a":1}', b"\xff", b" " * (5 << 20)])
def test_a_broken_config_is_corrupt(tmp_path: Path, content: bytes) -> None:
    folder = tiny_rand().save(tmp_path / "folder")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"config\.json"):
        SafetensorsSource(folder)


def test_absent_files_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        SafetensorsSource(tmp_path)
    folder = tiny_rand().save(tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        SafetensorsSource(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tiny_rand().save(tmp_path / "folder")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedModel, match=name):
        SafetensorsSource(folder)


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_nothing_in_a_folder_is_run(tmp_path: Path) -> None:
    """Code beside the weights, a config that asks for it, and pickles that leave a canary: none of it is touched (S11)."""
    canary = tmp_path / "canary"
    folder = tiny_rand().save(tmp_path / "folder")
    for name in ("modeling_evil.py", "tokenization_evil.py", "handler.py", "llama.py"):
        (folder / name).write_text(f"open({str(canary)!r}, 'w')")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Canary(canary)))
    (folder / "training_args.pt").write_bytes(pickle.dumps(_Canary(canary)))
    _config(folder, auto_map={"AutoModel": "modeling_evil.Evil"}, trust_remote_code=True, text_config={"trust_remote_code": True})
    opened: list[str] = []
    watching = [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and (event in ("pickle.find_class", "exec", "compile") or (event == "open" and "evil" in str(arguments[0]))):
            opened.append(event)

    sys.addaudithook(watch)
    try:
        source = SafetensorsSource(folder)
        assert torch.equal(source.load("model.norm.weight"), tiny_rand().tensors["model.norm.weight"])
        source.close()
    finally:
        watching.clear()
    assert not opened
    assert not canary.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert canary.exists(), "the canary cannot sing"
