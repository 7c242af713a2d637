"""Every GGUF block type against the `gguf` package, to the bit; and no bit pattern that breaks anything."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.quant.gguf_dequantize import dequantize
from engine.quant.gguf_types import GGUF_TYPES, LOADABLE_TYPES, TYPE_BY_NAME, GgufType

# where each type keeps its float16 scales, in bytes from the start of a block
SCALES = {
    "F32": (),
    "F16": (0,),
    "BF16": (),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
BLOCKS = 5000  # more than one chunk of the K types, and no multiple of it


def random_blocks(kind: GgufType, seed: int, *, finite: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (BLOCKS, kind.block_bytes), dtype=np.uint8)
    if finite:
        for at in SCALES[kind.name]:
            exponent_top = blocks[:, at + 1]
            blocks[:, at + 1] = np.where(exponent_top & 0x7C == 0x7C, exponent_top & 0xBF, exponent_top)
    return blocks


def test_the_table_is_that_of_the_gguf_package() -> None:
    known = {kind.name: (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind.name: (kind.id, kind.block_elements, kind.block_bytes) for kind in GGUF_TYPES} == known
    assert set(SCALES) == LOADABLE_TYPES


@pytest.mark.parametrize("name", sorted(LOADABLE_TYPES))
def test_random_blocks_are_equal_to_the_bit(name: str) -> None:
    kind = TYPE_BY_NAME[name]
    blocks = random_blocks(kind, 1, finite=True)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1)
    got = dequantize(torch.from_numpy(blocks), kind)
    if name not in ("F32", "BF16"):
        assert np.isfinite(want).all()
    same = got.float().numpy().view(np.uint32) == want.view(np.uint32)
    assert (same | np.isnan(want)).all()
    assert np.isnan(got.float().numpy())[np.isnan(want)].all()


@pytest.mark.parametrize("name", sorted(LOADABLE_TYPES))
@pytest.mark.parametrize("fill", [None, 0x00, 0xFF, 0x7C, 0x80])
def test_any_bit_pattern_gives_numbers(name: str, fill: int | None) -> None:
    kind = TYPE_BY_NAME[name]
    blocks = random_blocks(kind, 2, finite=False)
    if fill is not None:
        blocks[:] = fill
    got = dequantize(torch.from_numpy(blocks), kind)
    assert got.shape == (BLOCKS * kind.block_elements,)
    assert got.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_unaligned_bytes_are_read_too(name: str) -> None:
    kind = TYPE_BY_NAME[name]
    blocks = torch.from_numpy(random_blocks(kind, 3, finite=True)).view(-1)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), blocks))[1:]
    assert shifted.data_ptr() % kind.block_bytes
    assert torch.equal(dequantize(shifted, kind).view(torch.uint8), blocks)


def test_one_block_is_enough() -> None:
    blocks = np.zeros((1, 144), dtype=np.uint8)
    assert torch.equal(dequantize(torch.from_numpy(blocks), TYPE_BY_NAME["Q4_K"]), torch.zeros(256))
