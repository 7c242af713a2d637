"""Packing and unpacking of every type: against the dequantiser, against the layout read byte by byte, and with hostile sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.quant.gguf_dequantize import dequantize
from engine.quant.gguf_types import LOADABLE_TYPES, TYPE_BY_NAME
from engine.weights.packed_layout import Kind, kind_of, tensor_bytes
from engine.weights.source import open_source
from tests.engine.kernels.cpu.packed_calls import Refused, pack_raw, pack_tensor, read_weight, row_bytes, unpack_raw, unpack_tensor
from tests.fixtures.gguf_writer import interleave

EXACT = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PER_SCALE = {"Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
SHAPES = [(1, 256), (15, 512), (16, 256), (17, 768), (40, 256)]
DATA = Path(__file__).parents[3] / "data" / "gguf"


def random_source(dtype: str, rows: int, columns: int, scale: float = 0.01, seed: int = 0) -> bytes:
    """Random blocks, their float16 numbers normal with deviation `scale`; plain types: normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    kind = TYPE_BY_NAME[dtype]
    if kind.block_elements == 1:
        torch_type = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
        return bytes(torch.randn(rows * columns, generator=generator).to(torch_type).view(torch.uint8).numpy())
    blocks = torch.randint(0, 256, (rows * columns // kind.block_elements, kind.block_bytes), generator=generator).to(torch.uint8)
    for at in HALVES[dtype]:
        halves = (torch.randn(len(blocks), 1, generator=generator) * scale).half()
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    return bytes(blocks.flatten().numpy())


def dequantized(dtype: str, source: bytes, rows: int, columns: int) -> torch.Tensor:
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return dequantize(data, TYPE_BY_NAME[dtype]).float().view(rows, columns)


def round_trip(dtype: str, source: bytes, rows: int, columns: int, heads: int = 0) -> torch.Tensor:
    kind, packed, exponent = pack_tensor(dtype, source, rows, columns, heads=heads)
    return unpack_tensor(kind, packed, exponent, rows, columns)


def within_rounding(dtype: str, got: torch.Tensor, want: torch.Tensor) -> bool:
    """Scale and minimum are each rounded to 11 bits: what that can do to a weight, by the sizes in its own group."""
    groups = want.view(-1, PER_SCALE[dtype])
    size = groups.abs().amax(1, keepdim=True) + groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
    return bool(((got.view_as(groups) - groups).abs() <= 2.0**-10 * size).all())


def test_every_loadable_type_is_tested() -> None:
    assert {*EXACT, *K_TYPES} == LOADABLE_TYPES


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_types_with_float16_scales_come_back_to_the_bit(dtype: str, rows: int, columns: int) -> None:
    source = random_source(dtype, rows, columns)
    assert torch.equal(round_trip(dtype, source, rows, columns), dequantized(dtype, source, rows, columns))
    assert pack_tensor(dtype, source, rows, columns)[2] == 0


@pytest.mark.parametrize("dtype", K_TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_k_types_come_back_within_the_rounding_of_their_scales(dtype: str, rows: int, columns: int) -> None:
    source = random_source(dtype, rows, columns)
    want = dequantized(dtype, source, rows, columns)
    got = round_trip(dtype, source, rows, columns)
    assert within_rounding(dtype, got, want)
    assert not within_rounding(dtype, got * (1 + 2.0**-7), want)  # the bound can fail


@pytest.mark.parametrize("dtype", K_TYPES)
@pytest.mark.parametrize("scale", [50000.0, 1.0, 1e-3, 1e-5, 6e-7])
def test_no_scale_overflows_and_small_ones_lose_nothing(dtype: str, scale: float) -> None:
    """scale * 63 is far beyond float16 for the largest, and deep among its subnormals for the smallest."""
    source = bytearray(random_source(dtype, 16, 256))
    size = TYPE_BY_NAME[dtype].block_bytes
    for block in range(16):
        for at in HALVES[dtype]:
            half = torch.tensor([scale * (1 + block / 64)]).half()
            source[block * size + at : block * size + at + 2] = bytes(half.view(torch.uint8).numpy())
    want = dequantized(dtype, bytes(source), 16, 256)
    kind, packed, exponent = pack_tensor(dtype, bytes(source), 16, 256)
    got = unpack_tensor(kind, packed, exponent, 16, 256)
    assert got.isfinite().all()
    assert within_rounding(dtype, got, want)
    assert (exponent < 0) == (scale == 50000.0)
    assert exponent > 0 or scale >= 1e-3


def test_the_exponent_is_no_larger_than_it_must_be() -> None:
    """Q6_K with d and one scale for all: scale 2^-20 becomes a normal float16 (2^-14) and no more."""
    block = bytearray(random_source("Q6_K", 1, 256))
    block[192:208] = bytes([1] * 16)
    block[208:210] = bytes(torch.tensor([2.0**-20]).half().view(torch.uint8).numpy())
    assert pack_tensor("Q6_K", bytes(block), 1, 256)[2] == 6
    block[208:210] = bytes(torch.tensor([2.0**-14]).half().view(torch.uint8).numpy())
    assert pack_tensor("Q6_K", bytes(block), 1, 256)[2] == 0
    block[208:210] = bytes(2)
    assert pack_tensor("Q6_K", bytes(block), 1, 256)[2] == 0


@pytest.mark.parametrize("dtype", [*EXACT[3:], *K_TYPES])
def test_any_bytes_give_some_numbers(dtype: str) -> None:
    """Infinite and NaN scales stay in their own groups."""
    generator = torch.Generator().manual_seed(5)
    source = bytes(torch.randint(0, 256, (64 * row_bytes(dtype, 512),), generator=generator, dtype=torch.uint8).numpy())
    want, got = dequantized(dtype, source, 64, 512), round_trip(dtype, source, 64, 512)
    finite = want.isfinite()
    assert not finite.all()
    if dtype in EXACT:
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    else:
        assert got[finite].isfinite().float().mean() > 0.99  # scales near the largest float32 numbers of a group may round up
    assert not got[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", [*EXACT, *K_TYPES])
def test_every_byte_lies_where_the_layout_says(dtype: str) -> None:
    rows, columns = 19, 256
    source = random_source(dtype, rows, columns, seed=3)
    kind, packed, exponent = pack_tensor(dtype, source, rows, columns)
    got = unpack_tensor(kind, packed, exponent, rows, columns)
    for row in (0, 1, 7, 15, 16, 18):
        for column in (0, 3, 4, 7, 8, 15, 16, 31, 32, 100, 255):
            assert read_weight(kind, packed, exponent, columns, row, column) == got[row, column].item(), (row, column)


@pytest.mark.parametrize("dtype", [*EXACT, *K_TYPES])
def test_lanes_behind_the_last_row_are_zero(dtype: str) -> None:
    source = random_source(dtype, 17, 256)
    kind, packed, exponent = pack_tensor(dtype, source, 17, 256)
    whole = unpack_tensor(kind, packed, exponent, 32, 256)
    assert whole[16].any()
    assert not whole[17:].any()


@pytest.mark.parametrize("dtype", ["Q4_1", "F16", "F32", "Q6_K"])
def test_interleaved_heads_are_put_back(dtype: str) -> None:
    rows, columns, heads = 48, 256, 3
    source = random_source(dtype, rows, columns)
    size = row_bytes(dtype, columns)
    ordered = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(rows, size)
    stored = bytes(interleave(ordered, heads).flatten().numpy())
    assert stored != source
    assert torch.equal(round_trip(dtype, stored, rows, columns, heads), round_trip(dtype, source, rows, columns))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_bias_of_interleaved_heads(dtype: str) -> None:
    source = random_source(dtype, 1, 48)
    want = dequantized(dtype, source, 1, 48)
    values = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(48, -1)
    kind, packed, _ = pack_tensor(dtype, bytes(interleave(values, 4).flatten().numpy()), 1, 48, kind=Kind.VECTOR_F32, heads=4)
    assert torch.equal(unpack_tensor(kind, packed, 0, 1, 48), want)


@pytest.mark.parametrize("dtype", [*EXACT, *K_TYPES])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.VECTOR_F32])
def test_every_type_becomes_plain_float32_to_the_bit(dtype: str, kind: Kind) -> None:
    rows = 1 if kind is Kind.VECTOR_F32 else 18
    source = random_source(dtype, rows, 768)
    _, packed, exponent = pack_tensor(dtype, source, rows, 768, kind=kind)
    assert exponent == 0
    assert torch.equal(unpack_tensor(kind, packed, 0, rows, 768), dequantized(dtype, source, rows, 768))


def test_float64_is_rounded_once() -> None:
    values = torch.randn(5, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e3
    kind, packed, exponent = pack_tensor("F64", bytes(values.flatten().view(torch.uint8).numpy()), 5, 33)
    assert kind is Kind.F32
    assert torch.equal(unpack_tensor(kind, packed, exponent, 5, 33), values.float())


def test_float_kinds_take_any_number_of_columns() -> None:
    for columns in (1, 7, 255, 257, 600):
        source = random_source("BF16", 3, columns)
        assert torch.equal(round_trip("BF16", source, 3, columns), dequantized("BF16", source, 3, columns))


def test_some_rows_alone() -> None:
    source = random_source("Q8_0", 40, 64)
    kind, packed, exponent = pack_tensor("Q8_0", source, 40, 64)
    whole = unpack_tensor(kind, packed, exponent, 40, 64)
    assert torch.equal(unpack_raw(kind, exponent, packed, 40, 64, 15, 18), whole[15:33])
    assert unpack_raw(kind, exponent, packed, 40, 64, 40, 0).shape == (0, 64)


GOOD = random_source("Q4_1", 4, 64)
Q4_M_BYTES = tensor_bytes(Kind.Q4_M, 4, 64)
HUGE = (1 << 64) - 1
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unknown type": (lambda: pack_raw("Q9_9", GOOD, 4, 64, 5, Q4_M_BYTES), "type is not one"),
    "type of another kind": (lambda: pack_raw("Q4_1", GOOD, 4, 64, Kind.Q4_S, Q4_M_BYTES), "cannot become"),
    "no such kind": (lambda: pack_raw("Q4_1", GOOD, 4, 64, 10, Q4_M_BYTES), "cannot become"),
    "source too short": (lambda: pack_raw("Q4_1", GOOD[:-1], 4, 64, 5, Q4_M_BYTES), "not as long"),
    "source too long": (lambda: pack_raw("Q4_1", GOOD + b"\0", 4, 64, 5, Q4_M_BYTES), "not as long"),
    "target too short": (lambda: pack_raw("Q4_1", GOOD, 4, 64, 5, Q4_M_BYTES - 1), "not as long"),
    "target too long": (lambda: pack_raw("Q4_1", GOOD, 4, 64, 5, Q4_M_BYTES + 1), "not as long"),
    "no rows": (lambda: pack_raw("Q4_1", b"", 0, 64, 5, 0), "out of range"),
    "no columns": (lambda: pack_raw("Q4_1", b"", 4, 0, 5, 0), "out of range"),
    "half a block": (lambda: pack_raw("Q4_1", GOOD, 4, 48, 5, Q4_M_BYTES), "out of range"),
    "half a super-block": (lambda: pack_raw("Q4_K", bytes(144), 1, 128, 5, 4 * 320), "multiple of the type's block"),
    "rows beyond 64 bits": (lambda: pack_raw("Q4_1", GOOD, HUGE, 64, 5, Q4_M_BYTES), "out of range"),
    "a product that wraps": (lambda: pack_raw("F32", GOOD, 1 << 32, 1 << 32, 1, 0), "out of range"),
    "a vector of two rows": (lambda: pack_raw("F32", bytes(8), 2, 1, 0, 4), "out of range"),
    "heads that do not divide": (lambda: pack_raw("Q4_1", GOOD, 4, 64, 5, Q4_M_BYTES, heads=3), "twice the heads"),
    "more heads than rows": (lambda: pack_raw("Q4_1", GOOD, 4, 64, 5, Q4_M_BYTES, heads=1 << 63), "twice the heads"),
    "a vector of blocks with heads": (lambda: pack_raw("Q8_0", bytes(34), 1, 32, 0, 128, heads=2), "cannot be put"),
    "unpack: no such kind": (lambda: unpack_raw(10, 0, bytes(64), 1, 16, 0, 1), "kind and shape"),
    "unpack: wrong size": (lambda: unpack_raw(5, 0, bytes(Q4_M_BYTES - 1), 4, 64, 0, 4), "not as many"),
    "unpack: half a block": (lambda: unpack_raw(5, 0, bytes(Q4_M_BYTES), 4, 48, 0, 4), "kind and shape"),
    "unpack: rows that are not there": (lambda: unpack_raw(5, 0, bytes(Q4_M_BYTES), 4, 64, 3, 2), "not all there"),
    "unpack: a count that wraps": (lambda: unpack_raw(5, 0, bytes(Q4_M_BYTES), 4, 64, 2, HUGE), "not all there"),
    "unpack: an exponent beyond float32": (lambda: unpack_raw(5, 121, bytes(Q4_M_BYTES), 4, 64, 0, 4), "exponent"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(case: tuple[Callable[[], object], str]) -> None:
    call, says = case
    with pytest.raises(Refused, match=says):
        call()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_tensors_that_llama_cpp_quantised(name: str) -> None:
    """Against the dequantiser: what differs is the rounding of scales and minimums to 11 bits."""
    source = open_source(str(DATA / f"tiny-{name.lower()}.gguf"), "gguf")
    for tensor, info in source.tensors.items():
        if info.dtype not in K_TYPES:
            continue
        data, dtype = source.raw(tensor)
        want = source.load(tensor)
        got = round_trip(dtype, bytes(data), *info.shape, heads=source.interleaved_heads(tensor))
        assert within_rounding(dtype, got, want), tensor
        assert (got - want).norm() <= 1e-3 * want.norm(), tensor
    source.close()


def test_sizes_are_those_of_the_native_code() -> None:
    for dtype in [*EXACT, *K_TYPES]:
        source = random_source(dtype, 17, 256)
        size = tensor_bytes(kind_of(dtype), 17, 256)
        pack_raw(dtype, source, 17, 256, kind_of(dtype), size)
        with pytest.raises(Refused):
            pack_raw(dtype, source, 17, 256, kind_of(dtype), size + 1)


@pytest.mark.timing
def test_a_hundred_megabytes_take_less_than_half_a_second(real_model_path: Path) -> None:
    """Of processor time on one core, the whole model."""
    source = open_source(str(real_model_path), "gguf")
    spent = math.inf
    for _ in range(2):
        start = time.process_time()
        for name, info in source.tensors.items():
            if len(info.shape) == 2:
                data, dtype = source.raw(name)
                pack_tensor(dtype, bytes(data), *info.shape, heads=source.interleaved_heads(name))
        spent = min(spent, time.process_time() - start)
    source.close()
    assert spent < 0.5
