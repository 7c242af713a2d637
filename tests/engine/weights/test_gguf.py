"""The GGUF reader: sound files read right, and every way a file can lie ends in a typed error, fast and in little memory (S07)."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.errors import CavectlError, CorruptFile, ModelNotFound, UnsupportedModel
from engine.weights.gguf import GgufFile
from tests.fixtures.gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Array,
    Key,
    Layout,
    TensorRow,
    gguf_bytes,
    string,
)

KEYS = (Key("general.architecture", STRING, "llama"), Key("n", U32, 7))
ROW = TensorRow("a", (4, 2), data=struct.pack("<8f", *range(8)))
SOUND = Layout(KEYS, (ROW, TensorRow("b", (3,), data=struct.pack("<3f", 1, 2, 3))))
TYPE_Q8_0, TYPE_REMOVED = 8, 4


def write(folder: Path, layout: Layout | bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(layout if isinstance(layout, bytes) else gguf_bytes(layout))
    return path


@contextmanager
def frugal(seconds: float = 1.0, rss_bytes: int = 50 << 20) -> Iterator[None]:
    """The body takes less time, and its peak of resident memory is less above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = _memory("VmRSS"), time.process_time()  # of processor time: other programs may be busy too
    yield
    assert time.process_time() - started < seconds
    assert _memory("VmHWM") - before < rss_bytes


def _memory(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# --- sound files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_reads_every_scalar_array_and_tensor(tmp_path: Path, version: int, alignment: int) -> None:
    keys = [
        Key("u8", U8, 255),
        Key("i8", I8, -128),
        Key("u16", U16, 65535),
        Key("i32", I32, -(2**31)),
        Key("u64", U64, 2**64 - 1),
        Key("i64", I64, -(2**63)),
        Key("f32", F32, 0.5),
        Key("f64", F64, 1e-300),
        Key("yes", BOOL, True),
        Key("text", STRING, "é한🙂\0"),
        Key("empty", STRING, ""),
        Key("texts", ARRAY, Array(STRING, ["", "x", "é"])),
        Key("ints", ARRAY, Array(I32, [-1, 2**31 - 1])),
        Key("floats", ARRAY, Array(F32, [])),
        Key("general.alignment", U32, alignment),
    ]
    file = GgufFile(write(tmp_path, replace(SOUND, keys=keys, version=version, alignment=alignment)))
    for key in keys:
        if not isinstance(key.value, Array):
            assert file.metadata[str(key.name)] == key.value
            assert type(file.metadata[str(key.name)]) is type(key.value)
    assert file.array("texts", "string") == ["", "x", "é"]
    assert file.array("ints", "i32") == [-1, 2**31 - 1]
    assert file.array("floats", "f32") == []
    assert file.array("absent", "f32") is None
    for row in SOUND.tensors:
        assert bytes(file.raw(str(row.name))) == file.read(str(row.name)) == row.data
    assert file.tensors["a"].dims == (4, 2)
    file.close()


def test_a_file_without_tensors_is_sound(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, Layout(KEYS)))
    assert not file.tensors
    file.close()


def test_padding_after_the_last_tensor_may_be_absent(tmp_path: Path) -> None:
    data = gguf_bytes(SOUND)
    file = GgufFile(write(tmp_path, data[: -(32 - 12)]))
    assert len(file.raw("b")) == 12
    file.close()


def test_a_key_of_another_type_than_asked_for_is_corrupt(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, Layout((Key("flag", BOOL, True), Key("list", ARRAY, Array(I32, [1]))))))
    for ask in (
        lambda: file.scalar("flag", int),
        lambda: file.scalar("list", int),
        lambda: file.scalar("flag", str),
        lambda: file.array("flag", "i32"),
        lambda: file.array("list", "f32"),
    ):
        with pytest.raises(CorruptFile):
            ask()
    assert file.scalar("flag", bool) is True
    file.close()


def test_closing_twice_and_keeping_a_view_is_fine(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, SOUND))
    view = file.raw("a")
    file.close()
    file.close()
    assert bytes(view) == ROW.data


# --- files that lie ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lie:
    layout: Layout | bytes
    error: type[CavectlError] = CorruptFile
    says: str = ""


def _patched(position: int, data: bytes) -> bytes:
    whole = gguf_bytes(SOUND)
    return whole[:position] + data + whole[position + len(data) :]


def _with(*keys: Key) -> Layout:
    return SOUND.with_keys(*keys)


def _row(**changes: object) -> Layout:
    return replace(SOUND, tensors=(replace(ROW, **changes),))


BIGGEST = 0x7FFFFFFFFFFFFFC0
HUGE = TensorRow("huge", (BIGGEST,), type=24)
LIES: dict[str, Lie] = {
    "empty file": Lie(b"", says="too short"),
    "magic only": Lie(b"GGUF", says="too short"),
    "bad magic": Lie(replace(SOUND, magic=b"FUGU"), says="not a GGUF"),
    "version 0": Lie(replace(SOUND, version=0), UnsupportedModel, "version 0"),
    "version 1": Lie(replace(SOUND, version=1), UnsupportedModel, "version 1"),
    "version 4": Lie(replace(SOUND, version=4), UnsupportedModel, "version 4"),
    "big-endian": Lie(replace(SOUND, version=3 << 24), UnsupportedModel, "big-endian"),
    "version 1 with a string of length 0": Lie(
        b"GGUF" + struct.pack("<III", 1, 0, 1) + struct.pack("<III", 0, STRING, 0) + bytes(8), UnsupportedModel, "version 1"
    ),
    "tensor count -1": Lie(replace(SOUND, tensor_count=-1), says="-1 tensors"),
    "tensor count beyond the file": Lie(replace(SOUND, tensor_count=60_000), says="60000 tensors"),
    "tensor count beyond the cap": Lie(replace(SOUND, tensor_count=2**62), says="tensors"),
    "one tensor too many": Lie(replace(SOUND, tensor_count=3)),
    "key count -1": Lie(replace(SOUND, key_count=-1), says="-1 keys"),
    "key count beyond the file": Lie(replace(SOUND, key_count=60_000), says="60000 keys"),
    "key count beyond the cap": Lie(replace(SOUND, key_count=2**63 - 1), says="keys"),
    "one key too many": Lie(replace(SOUND, key_count=3)),
    "key length -1": Lie(_patched(24, struct.pack("<q", -1)), says="a key claims"),
    "key of 64 KiB": Lie(_with(Key("k" * 65_536, U8, 1)), says="a key claims"),
    "empty key": Lie(_with(Key("", U8, 1)), says="a key is empty"),
    "key that is not UTF-8": Lie(_with(Key(b"\xff\xfe", U8, 1)), says="not UTF-8"),
    "value that is not UTF-8": Lie(_with(Key("k", STRING, string(b"\xc3\x28"))), says="not UTF-8"),
    "bad key type": Lie(_with(Key("k", 13, b"")), says="unknown type 13"),
    "bad array type": Lie(_with(Key("k", ARRAY, struct.pack("<IQ", 13, 0))), says="unknown type 13"),
    "duplicate key": Lie(_with(KEYS[0]), says="appears twice"),
    "boolean 2": Lie(_with(Key("k", BOOL, b"\x02")), says="neither"),
    "string beyond the file": Lie(_with(Key("k", STRING, string(b"x", 1 << 20))), says="ends early"),
    "string beyond the cap": Lie(_with(Key("k", STRING, string(b"x", 2**64 - 1))), says="claims"),
    "array beyond the file": Lie(_with(Key("k", ARRAY, struct.pack("<IQ", U64, 1 << 20))), says="items in k"),
    "array beyond the cap": Lie(_with(Key("k", ARRAY, struct.pack("<IQ", U8, 2**64 - 1))), says="items in k"),
    "array whose size overflows": Lie(_with(Key("k", ARRAY, struct.pack("<IQ", U64, 2**61 + 1))), says="items in k"),
    "array of arrays": Lie(_with(Key("k", ARRAY, Array(ARRAY, [Array(U8, [1])]))), says="array of arrays"),
    "strings that run past the end": Lie(
        _with(Key("k", ARRAY, Array(STRING, ["a", "b"])), Key("z", ARRAY, struct.pack("<IQ", STRING, 9) + string(b"", 2**63))),
        says="past the end",
    ),
    "last string too long": Lie(
        Layout((Key("k", ARRAY, struct.pack("<IQ", STRING, 1) + string(b"x", 2**64 - 1)),)), says="past the end"
    ),
    "alignment 13": Lie(_with(Key("general.alignment", U32, 13)), says="power of two"),
    "alignment 0": Lie(_with(Key("general.alignment", U32, 0)), says="power of two"),
    "alignment of 2 MiB": Lie(_with(Key("general.alignment", U32, 1 << 21)), says="power of two"),
    "alignment of another type": Lie(_with(Key("general.alignment", U64, 32)), says="power of two"),
    "alignment key above the data's": Lie(_with(Key("general.alignment", U32, 64)), says="begins at"),
    "alignment key below the data's": Lie(_with(Key("general.alignment", U32, 1)), says="its tensors need"),
    "bytes after the last tensor": Lie(replace(SOUND, tail=bytes(1)), says="its tensors need"),
    "tensor name too long": Lie(_row(name="n" * 65), says="name claims"),
    "tensor name length -1": Lie(_row(name=b"", n_dims=2**32 - 1), says="no name"),
    "tensor name empty": Lie(_row(name=""), says="no name"),
    "duplicate tensor": Lie(replace(SOUND, tensors=(ROW, ROW)), says="appears twice"),
    "no dimensions": Lie(_row(dims=()), says="0 dimensions"),
    "five dimensions": Lie(_row(dims=(4, 2, 1, 1, 1)), says="5 dimensions"),
    "2^32 - 1 dimensions": Lie(_row(n_dims=2**32 - 1), says="dimensions"),
    "negative dimension": Lie(_row(dims=(4, -2)), says="shape"),
    "zero dimension": Lie(_row(dims=(4, 0), data=b""), says="shape"),
    "two negative dimensions": Lie(_row(dims=(-4, -2)), says="shape"),
    "too many elements": Lie(_row(dims=(2**25, 2**24)), says="shape"),
    "elements that overflow": Lie(_row(dims=(2**32, 2**32)), says="shape"),
    "elements that overflow to 0": Lie(_row(dims=(2**62, 4, 2**2)), says="shape"),
    "bytes beyond the file": Lie(_row(dims=(2**24, 2**24)), says="its tensors need"),
    "unknown tensor type": Lie(_row(type=999), UnsupportedModel, "unknown type 999"),
    "removed tensor type": Lie(_row(type=TYPE_REMOVED), UnsupportedModel, "unknown type 4"),
    "row that is no multiple of the block": Lie(_row(type=TYPE_Q8_0, dims=(48, 2)), says="multiple of 32"),
    "offset not aligned": Lie(_row(offset=1), says="begins at"),
    "offset beyond the file": Lie(_row(offset=1 << 40), says="begins at"),
    "offset -1": Lie(_row(offset=2**64 - 1), says="begins at"),
    "tensors that overlap": Lie(replace(SOUND, tensors=(ROW, replace(ROW, name="b", offset=0))), says="begins at"),
    "tensors with a gap": Lie(replace(SOUND, tensors=(ROW, replace(ROW, name="b", offset=64))), says="begins at"),
    "data cut by a byte": Lie(gguf_bytes(_row())[:-1], says="its tensors need"),
    "no data": Lie(gguf_bytes(_row())[:-32], says="its tensors need"),
    "tensor of 0x7FFFFFFFFFFFFFC0 bytes twice": Lie(
        replace(SOUND, tensors=(replace(HUGE, name="a"), replace(HUGE, name="b", offset=BIGGEST))),
        says="shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_every_lie_is_a_typed_error(tmp_path: Path, lie: Lie) -> None:
    path = write(tmp_path, lie.layout)
    with frugal(), pytest.raises(lie.error) as caught:
        GgufFile(path)
    assert type(caught.value) is lie.error
    assert lie.says in caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_every_truncation_of_a_sound_file_is_corrupt(tmp_path: Path) -> None:
    whole = gguf_bytes(SOUND)
    needed = len(whole) - (32 - 12)  # the padding after the last tensor may go
    for length in range(needed):
        with pytest.raises(CorruptFile):
            GgufFile(write(tmp_path, whole[:length]))


@pytest.mark.parametrize("item", [STRING, U8])
def test_ten_million_merges_are_refused_by_their_count(tmp_path: Path, item: int) -> None:
    width = 8 if item == STRING else 1
    header = b"GGUF" + struct.pack("<Iqq", 3, 0, 1) + string("tokenizer.ggml.merges") + struct.pack("<IIQ", ARRAY, item, 10_000_000)
    path = write(tmp_path, header)
    with path.open("r+b") as file:
        file.truncate(len(header) + 10_000_000 * width)
    with frugal(), pytest.raises(CorruptFile, match="10000000 items"):
        GgufFile(path)


def test_a_header_beyond_its_cap_is_refused(tmp_path: Path) -> None:
    """200 MiB of text, honestly declared: a sparse file, so nothing of it must be read."""
    key = string("a") + struct.pack("<IQ", STRING, 16 << 20)
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<Iqq", 3, 0, 13) + key)
        file.truncate(200 << 20)
    with frugal(), pytest.raises(CorruptFile):
        GgufFile(path)


def test_opening_costs_what_the_header_costs(tmp_path: Path) -> None:
    """60,000 tensors and 60,000 keys: linear, so far below the second that quadratic work would take."""
    rows = [TensorRow(f"t{i}", (1,), data=b"\0\0\0\0") for i in range(60_000)]
    keys = [Key(f"k{i}", U8, 1) for i in range(60_000)]
    path = write(tmp_path, Layout(keys, rows))
    with frugal(seconds=5.0):
        file = GgufFile(path)
    assert len(file.tensors) == len(file.metadata) == 60_000
    file.close()


def test_not_a_regular_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path / "fifo.gguf", tmp_path):
        with pytest.raises(CorruptFile, match="not a regular file"):
            GgufFile(path)
    with pytest.raises(ModelNotFound, match=r"there is no file absent\.gguf"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFound):
        GgufFile("a\0b")


def test_a_file_cut_after_opening_is_refused_when_mapped(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    file = GgufFile(path)
    with path.open("r+b") as handle:
        handle.truncate(40)
    with pytest.raises(CorruptFile, match="was cut while open"):
        file.raw("a")
    file.close()


def test_strings_of_an_array_must_be_text(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, Layout((Key("k", ARRAY, struct.pack("<IQ", STRING, 1) + string(b"\xff")),))))
    with pytest.raises(CorruptFile, match="not UTF-8"):
        file.array("k", "string")
    file.close()
