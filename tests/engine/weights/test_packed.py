"""Packed files: every parameter in one, tied heads as the loader has them (B31), made whole or not at all, used only when right."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.errors import CavectlError, CorruptFile, UnsupportedModel
from engine.models.spec import ParameterInfo
from engine.weights import packing
from engine.weights.packed import PackedFile, Stale, open_fresh, open_or_pack
from engine.weights.packed_layout import HEADER, RECORD, Kind
from tests.engine.weights.packed_models import DIGEST, Checkpoint, checkpoint, quiet, unpacked
from tests.fixtures.gguf_writer import gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import TinyRand, tiny_rand

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "gguf"


def changed(model: TinyRand, tensors: Mapping[str, torch.Tensor | None]) -> TinyRand:
    kept = {name: tensor for name, tensor in {**model.tensors, **tensors}.items() if tensor is not None}
    return TinyRand(model.config, kept)


def gguf_file(folder: Path, model: TinyRand) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors)))
    return path


def same_as_the_loader(opened: Checkpoint, packed: PackedFile) -> bool:
    loaded = opened.load()
    if loaded["head"] is loaded["embed"]:
        del loaded["head"]
    assert packed.tensors.keys() == loaded.keys()
    return all(torch.equal(unpacked(packed, name).view(want.shape), want) for name, want in loaded.items())


# --- what is in it ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    model = tiny_rand(dtype=dtype, attention_bias=True, mlp_bias=True)
    with checkpoint(model.save(tmp_path / "model", shards)) as opened:
        opened.pack(tmp_path / "packed")
        packed = PackedFile.open(tmp_path / "packed", DIGEST)
        assert same_as_the_loader(opened, packed)
        kinds = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16, torch.float64: Kind.F32}
        assert {t.kind for t in packed.tensors.values()} == {kinds[dtype], Kind.VECTOR_F32}
        packed.close()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_with_interleaved_heads_and_biases(tmp_path: Path, tied: bool) -> None:
    model = tiny_rand(tied=tied, attention_bias=True, heads=4, kv_heads=2)
    with checkpoint(gguf_file(tmp_path, model)) as opened:
        opened.pack(tmp_path / "packed")
        packed = PackedFile.open(tmp_path / "packed", DIGEST)
        assert same_as_the_loader(opened, packed)
        assert ("head" in packed.tensors) == (not tied)
        assert torch.equal(unpacked(packed, "layers.0.q"), model.tensors["model.layers.0.self_attn.q_proj.weight"])
        assert torch.equal(unpacked(packed, "layers.1.k.bias")[0], model.tensors["model.layers.1.self_attn.k_proj.bias"])
        packed.close()


def test_the_real_model(tmp_path: Path, real_model_path: Path) -> None:
    with checkpoint(real_model_path) as opened:
        opened.pack(tmp_path / "packed")
        packed = PackedFile.open(tmp_path / "packed", DIGEST)
        assert same_as_the_loader(opened, packed)
        assert packed.weight_bytes == opened.source.info.weight_bytes  # Q4_1 and Q8_0 take as much as before
        assert (tmp_path / "packed").stat().st_size < 1.001 * packed.weight_bytes
        assert {packed.tensors[name].kind for name in ("embed", "layers.0.q", "final_norm")} == {
            *(Kind.Q8_S, Kind.Q4_M, Kind.VECTOR_F32)
        }
        packed.close()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_files_of_k_types(tmp_path: Path, name: str) -> None:
    with checkpoint(DATA / f"tiny-{name.lower()}.gguf") as opened:
        opened.pack(tmp_path / "packed")
        packed = PackedFile.open(tmp_path / "packed", DIGEST)
        loaded = opened.load()
        for ours, tensor in packed.tensors.items():
            want = loaded[ours].view(tensor.rows, tensor.columns)
            assert (unpacked(packed, ours) - want).norm() <= 1e-3 * want.norm(), ours
        packed.close()


def test_tensors_lie_in_order_on_multiples_of_64(tmp_path: Path) -> None:
    with checkpoint(tiny_rand(vocab=321).save(tmp_path / "model")) as opened:
        opened.pack(tmp_path / "packed")
    packed = PackedFile.open(tmp_path / "packed", DIGEST)
    tensors = list(packed.tensors.values())
    assert [t.index for t in tensors] == list(range(len(tensors)))
    assert all(t.offset % 64 == 0 for t in tensors)
    assert all(0 <= b.offset - a.offset - a.bytes < 64 for a, b in pairwise(tensors))
    assert tensors[-1].offset + tensors[-1].bytes == len(packed.data) == (tmp_path / "packed").stat().st_size
    packed.close()


def stacked(opened: Checkpoint, parts: tuple[str, str], rows: int) -> dict[str, ParameterInfo]:
    names = {n: p for n, p in opened.parameters.items() if not any(part in p.names for part in parts)}
    return names | {"layers.0.both": ParameterInfo(parts, (rows, 64))}


@pytest.mark.parametrize("second", [torch.float32, torch.float16])
def test_several_tensors_are_stacked_on_rows(tmp_path: Path, second: torch.dtype) -> None:
    """Also where they have different types: then exactly, as float32. 33 rows begin in the middle of a panel."""
    parts = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    model = tiny_rand()
    q = model.tensors[parts[1]].to(second)
    with checkpoint(changed(model, {parts[1]: q}).save(tmp_path / "model")) as opened:
        both = Checkpoint(opened.source, opened.spec, stacked(opened, parts, 96))
        both.pack(tmp_path / "packed")
    packed = PackedFile.open(tmp_path / "packed", DIGEST)
    assert packed.tensors["layers.0.both"].kind is Kind.F32
    assert torch.equal(unpacked(packed, "layers.0.both"), torch.cat([model.tensors[parts[0]], q.float()]))
    packed.close()


def test_what_is_stacked_from_interleaved_heads_is_refused(tmp_path: Path) -> None:
    parts = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    with checkpoint(gguf_file(tmp_path, tiny_rand())) as opened:
        both = Checkpoint(opened.source, opened.spec, stacked(opened, parts, 96))
        with pytest.raises(UnsupportedModel, match="interleaved"):
            both.pack(tmp_path / "packed")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_set_of_tensors_that_does_not_match_is_refused(tmp_path: Path) -> None:
    model = changed(tiny_rand(), {"model.norm.weight": None})
    with checkpoint(model.save(tmp_path / "model")) as opened, pytest.raises(CorruptFile, match=r"lacks 1 of 21 tensors"):
        opened.pack(tmp_path / "packed")
    assert os.listdir(tmp_path) == ["model"]


# --- tied heads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_of_its_own(tmp_path: Path, head_type: torch.dtype, same: bool) -> None:
    """Dropped when it is the embedding again, in whatever type; else the checkpoint has the last word, and it is said."""
    model = tiny_rand(tied=True, vocab=5000)
    embedding = model.tensors["model.embed_tokens.weight"].bfloat16().float()
    head = embedding.clone()
    head[-1, -1] += 0 if same else 1
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head.to(head_type)}
    with checkpoint(changed(model, tensors).save(tmp_path / "model")) as opened:
        packed = opened.open_or_pack(tmp_path / "packed")
        assert ("head" in packed.tensors) == (not same)
        assert [("head of its own" in note) for note in packed.notes] == [True] * (not same)
        packed.close()
        again = opened.open_or_pack(tmp_path / "packed")  # the note is in the file
        assert len(again.notes) == (not same)
        again.close()


# --- whole or not at all ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return tiny_rand().save(tmp_path / "model")


def test_the_mapping_is_read_only_and_outlives_the_file(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed")
        packed = PackedFile.open(tmp_path / "packed", DIGEST)
        (tmp_path / "packed").unlink()
        assert same_as_the_loader(opened, packed)
    with pytest.raises(TypeError):
        packed.data[100] = 1
    packed.close()
    packed.close()


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "a")
        opened.pack(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def failing(error: OSError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("call", ["reserve_file", "_check_space"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    (tmp_path / "packed").write_bytes(b"old")
    monkeypatch.setattr(packing, call, failing(OSError(errno.ENOSPC, "full")))
    with checkpoint(model_folder) as opened, pytest.raises(CavectlError) as caught:
        opened.pack(tmp_path / "packed")
    assert caught.value.code == "no_space"
    assert sorted(os.listdir(tmp_path)) == ["model", "packed"]
    assert (tmp_path / "packed").read_bytes() == b"old"


def test_space_that_is_to_stay_free(tmp_path: Path, model_folder: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with checkpoint(model_folder) as opened, pytest.raises(CavectlError) as caught:
        opened.pack(tmp_path / "packed", keep_free_bytes=free)
    assert caught.value.code == "no_space"


def test_an_interrupted_packing_leaves_nothing(tmp_path: Path, model_folder: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if fraction > 0.3:
            raise KeyboardInterrupt

    with checkpoint(model_folder) as opened, pytest.raises(KeyboardInterrupt):
        opened.pack(tmp_path / "packed", progress=interrupt)
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_process_left_goes_when_it_is_old(tmp_path: Path, model_folder: Path) -> None:
    old, new = tmp_path / f".packed.{'0' * 16}", tmp_path / f".packed.{'1' * 16}"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed")
    assert (old.exists(), new.exists()) == (False, True)


def test_progress_goes_up_to_one(tmp_path: Path, model_folder: Path) -> None:
    seen: list[float] = []
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed", progress=lambda stage, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 10


# --- used only when right -----------------------------------------------------------------------------------------------------


def other_version(data: bytearray) -> None:
    struct.pack_into("<I", data, 8, 2)


def other_exponent(data: bytearray) -> None:
    """Allowed by the native check for a kind of blocks; the checksum of the table knows."""
    struct.pack_into("<I", data, HEADER.size, Kind.VECTOR_F32)


def cut(data: bytearray) -> None:
    del data[-1:]


def empty(data: bytearray) -> None:
    data.clear()


def longer(data: bytearray) -> None:
    data += bytes(64)


def broken_meta(data: bytearray) -> None:
    count = struct.unpack_from("<I", data, 12)[0]
    data[HEADER.size + count * RECORD.size] = ord("[")


def renamed(data: bytearray) -> None:
    at = data.index(b'"embed"')
    data[at : at + 7] = b'"embad"'


def twice(data: bytearray) -> None:
    at = data.index(b'"layers.0.q"')
    data[at : at + 12] = b'"layers.0.k"'


DAMAGE = [other_version, other_exponent, cut, empty, longer, broken_meta, renamed, twice]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_right_is_made_anew(tmp_path: Path, model_folder: Path, damage: Callable[[bytearray], None]) -> None:
    path = tmp_path / "packed"
    with checkpoint(model_folder) as opened:
        opened.pack(path)
        good = path.read_bytes()
        data = bytearray(good)
        damage(data)
        path.write_bytes(data)
        assert open_fresh(path, DIGEST, opened.parameters) is None
        packed = opened.open_or_pack(path)
        assert same_as_the_loader(opened, packed)
        packed.close()
    assert path.read_bytes() == good


def test_what_is_right_is_not_touched(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.open_or_pack(tmp_path / "packed").close()
        inode = (tmp_path / "packed").stat().st_ino
        opened.open_or_pack(tmp_path / "packed").close()
        assert (tmp_path / "packed").stat().st_ino == inode
        opened.open_or_pack(tmp_path / "packed", digest="sha256:" + "cd" * 32).close()
        assert (tmp_path / "packed").stat().st_ino != inode


def test_other_weights_or_another_layout_are_stale(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "packed"
    with checkpoint(model_folder) as opened:
        opened.pack(path)
    with pytest.raises(Stale, match="other weights"):
        PackedFile.open(path, "sha256:" + "cd" * 32)
    data = bytearray(path.read_bytes())
    other_version(data)
    path.write_bytes(data)
    with pytest.raises(Stale, match="version 2"):
        PackedFile.open(path, DIGEST)


def test_another_model_under_the_same_digest_is_not_used(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed")
    with checkpoint(tiny_rand(layers=3).save(tmp_path / "other")) as opened:
        assert open_fresh(tmp_path / "packed", DIGEST, opened.parameters) is None
    with checkpoint(tiny_rand(ffn=64).save(tmp_path / "third")) as opened:
        assert open_fresh(tmp_path / "packed", DIGEST, opened.parameters) is None


def test_a_link_or_a_pipe_is_not_opened(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed")
        (tmp_path / "link").symlink_to(tmp_path / "packed")
        os.mkfifo(tmp_path / "pipe")
        for name in ("link", "pipe", "absent"):
            assert open_fresh(tmp_path / name, DIGEST, opened.parameters) is None


@pytest.mark.parametrize("path", ["", "gone/packed"])
def test_without_a_place_nothing_is_kept(tmp_path: Path, model_folder: Path, path: str) -> None:
    with checkpoint(model_folder) as opened:
        packed = opened.open_or_pack(tmp_path / path if path else "")
        assert same_as_the_loader(opened, packed)
        assert len(packed.notes) == bool(path)
        assert all("packed at each load" in note for note in packed.notes)
        packed.close()
    assert os.listdir(tmp_path) == ["model"]


def test_a_checkpoint_that_cannot_be_packed_is_its_own_error(tmp_path: Path) -> None:
    model = changed(tiny_rand(), {"model.norm.weight": None})
    with checkpoint(model.save(tmp_path / "model")) as opened, pytest.raises(CorruptFile):
        open_or_pack(opened.source, opened.spec, opened.parameters, path="", digest="", progress=quiet)


def test_the_mapping_is_shared(tmp_path: Path, model_folder: Path) -> None:
    with checkpoint(model_folder) as opened:
        opened.pack(tmp_path / "packed")
    packed = PackedFile.open(tmp_path / "packed", DIGEST)
    tensor = packed.tensors["final_norm"]
    with (tmp_path / "packed").open("r+b") as file, mmap.mmap(file.fileno(), 0) as other:
        other[tensor.offset] ^= 1
        assert packed.data[tensor.offset] == other[tensor.offset]
    packed.close()


def test_torch_and_numpy_are_not_needed(tmp_path: Path, model_folder: Path) -> None:
    """The task in a process where they cannot be imported."""
    script = (
        "import sys\n"
        "for name in ('torch', 'numpy'): sys.modules[name] = None\n"
        "from engine.pack import main\n"
        f"sys.exit(main([{str(model_folder)!r}, '--target', {str(tmp_path / 'packed')!r}, '--digest', {DIGEST!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    PackedFile.open(tmp_path / "packed", DIGEST).close()
