"""The native check of packed files against a plain one in Python, on headers and records that lie, and on flipped bytes."""

from __future__ import annotations

import ctypes
import random
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import CavectlError
from engine.kernels.cpu.lib import load
from engine.weights.packed import PackedFile
from engine.weights.packed_layout import HEADER, RECORD
from tests.engine.weights.packed_models import DIGEST, checkpoint
from tests.fixtures.tiny_rand import tiny_rand

BLOCK_BYTES = {4: 288, 5: 320, 6: 384, 7: 544, 8: 576, 9: 576}
ITEM_BYTES = {1: 4, 2: 2, 3: 2}
INTERESTING = [0, 1, 2, 15, 16, 31, 32, 63, 64, 65, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 48, 1 << 63, (1 << 64) - 64]
INTERESTING += [(1 << 64) - 1, (1 << 32) - 1]


def native(data: bytes) -> bool:
    error = ctypes.create_string_buffer(512)
    held = (ctypes.c_char * max(1, len(data))).from_buffer_copy(data or b"\0")
    code = load().functions.cavectl_check_packed(held, len(data), error)
    assert code in (0, -1)
    assert (code == 0) == (error.value == b"")
    return code == 0


def plain(data: bytes) -> bool:
    """What formats.h says of a file, in numbers that do not wrap."""
    if len(data) < 48:
        return False
    magic, version, count, size, meta_at, meta_bytes, reserved = struct.unpack_from("<8sIIQQQQ", data)
    end = 48 + 48 * count
    if (magic, version, size, reserved, meta_at) != (b"CAVEPACK", 1, len(data), 0, end) or not count or end + meta_bytes > size:
        return False
    end += meta_bytes
    for index in range(count):
        kind, exponent, rows, columns, offset, bytes_, reserved = struct.unpack_from("<IiQQQQQ", data, 48 + 48 * index)
        if kind > 9 or not 1 <= rows <= 1 << 32 or not 1 <= columns <= 1 << 32 or rows * columns > 1 << 48 or reserved:
            return False
        if kind == 0:
            fits, need = rows == 1, 4 * columns
        elif kind < 4:
            fits, need = True, -(-rows // 16) * 16 * columns * ITEM_BYTES[kind]
        else:
            fits, need = columns % 32 == 0, -(-rows // 16) * (columns // 32) * BLOCK_BYTES[kind]
        if not fits or need != bytes_ or offset != -(-end // 64) * 64 or abs(exponent) > (120 if kind > 3 else 0):
            return False
        end = offset + bytes_
    return end == size


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Small enough to be checked a thousand times; kinds of every sort by its records."""
    folder = tmp_path_factory.mktemp("packed")
    with checkpoint(tiny_rand(vocab=40, width=32, heads=2, kv_heads=1, ffn=32, layers=1).save(folder / "model")) as opened:
        opened.pack(folder / "packed")
    return (folder / "packed").read_bytes()


def made_of(shapes: list[tuple[int, int, int]], meta: bytes = b"{}") -> bytearray:
    """A sound file with tensors of these kinds, rows and columns."""
    records, body = b"", bytearray()
    start = 48 + 48 * len(shapes) + len(meta)
    for kind, rows, columns in shapes:
        need = {0: 4 * columns}.get(kind)
        if need is None:
            panel = columns * 16 * ITEM_BYTES[kind] if kind < 4 else columns // 32 * BLOCK_BYTES[kind]
            need = -(-rows // 16) * panel
        body += bytes(-(start + len(body)) % 64)
        records += struct.pack("<IiQQQQQ", kind, 0, rows, columns, start + len(body), need, 0)
        body += bytes(need)
    header = struct.pack("<8sIIQQQQ", b"CAVEPACK", 1, len(shapes), start + len(body), 48 + len(records), len(meta), 0)
    return bytearray(header + records + meta + body)


def test_sound_files_pass(good: bytes) -> None:
    assert native(good)
    assert plain(good)
    every_kind = bytes(made_of([(kind, 1 if kind == 0 else 17, 64) for kind in range(10)]))
    assert native(every_kind)
    assert plain(every_kind)


SHAPES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 3)).map(
        lambda shape: (shape[0], 1 if shape[0] == 0 else shape[1], 32 * shape[2])
    ),
    min_size=1,
    max_size=5,
)
NUMBERS = st.one_of(st.sampled_from(INTERESTING), st.integers(0, (1 << 64) - 1), st.integers(0, 4096))
# which field of which record (-1: the header), and what to write there or add to it
CHANGES = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 6), NUMBERS, st.booleans()), min_size=0, max_size=3)
HEADER_FIELDS = ((0, "Q"), (8, "I"), (12, "I"), (16, "Q"), (24, "Q"), (32, "Q"), (40, "Q"))
RECORD_FIELDS = ((0, "I"), (4, "I"), (8, "Q"), (16, "Q"), (24, "Q"), (32, "Q"), (40, "Q"))


@settings(max_examples=1500, deadline=None)
@given(SHAPES, st.binary(max_size=70), CHANGES, st.integers(-130, 130))
def test_the_native_check_agrees_with_the_plain_one(
    shapes: list[tuple[int, int, int]], meta: bytes, changes: list[tuple[int, int, int, bool]], tail: int
) -> None:
    data = made_of(shapes, meta)
    for which, field, number, added in changes:
        at, code = (HEADER_FIELDS if which < 0 else RECORD_FIELDS)[field]
        at += 0 if which < 0 else 48 + 48 * (which % len(shapes))
        mask = (1 << 64) - 1 if code == "Q" else (1 << 32) - 1
        old = struct.unpack_from(f"<{code}", data, at)[0]
        struct.pack_into(f"<{code}", data, at, ((old if added else 0) + number) & mask)
    if tail < 0 and len(changes) == 3:
        del data[tail:]
    elif len(changes) == 3:
        data += bytes(tail)
    assert native(bytes(data)) == plain(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_bytes_that_are_no_packed_file(data: bytes) -> None:
    assert not native(data)
    assert not native(b"CAVEPACK\x01\0\0\0" + data) or plain(b"CAVEPACK\x01\0\0\0" + data)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_opening_a_file_with_flipped_bytes_is_the_file_or_an_error(good: bytes, tmp_path: Path, rng: random.Random) -> None:
    """Anywhere in header, records and description: what opens has the tables that were written."""
    data = bytearray(good)
    tables = struct.unpack_from("<Q", data, 24)[0] + struct.unpack_from("<Q", data, 32)[0]
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(tables)] ^= 1 << rng.randrange(8)
    path = tmp_path / "packed"
    path.write_bytes(data)
    try:
        packed = PackedFile.open(path, DIGEST)
    except CavectlError:
        return
    count = HEADER.size + len(packed.tensors) * RECORD.size
    assert data[:count] == good[:count]
    packed.close()


@pytest.mark.parametrize("length", [0, 1, 47, 48, 95, 96])
def test_cut_files(good: bytes, length: int) -> None:
    assert not native(good[:length])


def test_an_empty_table_and_one_beyond_the_file() -> None:
    for count in (0, 2, 1 << 20, (1 << 32) - 1):
        data = made_of([(5, 16, 32)])
        struct.pack_into("<I", data, 12, count)
        assert not native(bytes(data))
