"""The tensor types of GGUF files: names, numbers and block sizes.

Owned here: the table alone, usable without torch or numpy. Turning blocks into numbers is gguf_dequantize.py.
Invariant: a row of n elements takes n / block_elements * block_bytes bytes; n is a multiple of block_elements.
Source: the GGUF format document and the block layouts of ggml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    name: str
    id: int
    block_elements: int
    block_bytes: int


GGUF_TYPES: tuple[GgufType, ...] = (
    GgufType("F32", 0, 1, 4),
    GgufType("F16", 1, 1, 2),
    GgufType("Q4_0", 2, 32, 18),
    GgufType("Q4_1", 3, 32, 20),
    GgufType("Q5_0", 6, 32, 22),
    GgufType("Q5_1", 7, 32, 24),
    GgufType("Q8_0", 8, 32, 34),
    GgufType("Q8_1", 9, 32, 40),
    GgufType("Q2_K", 10, 256, 84),
    GgufType("Q3_K", 11, 256, 110),
    GgufType("Q4_K", 12, 256, 144),
    GgufType("Q5_K", 13, 256, 176),
    GgufType("Q6_K", 14, 256, 210),
    GgufType("Q8_K", 15, 256, 292),
    GgufType("IQ2_XXS", 16, 256, 66),
    GgufType("IQ2_XS", 17, 256, 74),
    GgufType("IQ3_XXS", 18, 256, 98),
    GgufType("IQ1_S", 19, 256, 50),
    GgufType("IQ4_NL", 20, 32, 18),
    GgufType("IQ3_S", 21, 256, 110),
    GgufType("IQ2_S", 22, 256, 82),
    GgufType("IQ4_XS", 23, 256, 136),
    GgufType("I8", 24, 1, 1),
    GgufType("I16", 25, 1, 2),
    GgufType("I32", 26, 1, 4),
    GgufType("I64", 27, 1, 8),
    GgufType("F64", 28, 1, 8),
    GgufType("IQ1_M", 29, 256, 56),
    GgufType("BF16", 30, 1, 2),
    GgufType("TQ1_0", 34, 256, 54),
    GgufType("TQ2_0", 35, 256, 66),
    GgufType("MXFP4", 39, 32, 17),
    GgufType("NVFP4", 40, 64, 36),
    GgufType("Q1_0", 41, 128, 18),
)

TYPE_BY_ID: Mapping[int, GgufType] = {kind.id: kind for kind in GGUF_TYPES}
TYPE_BY_NAME: Mapping[str, GgufType] = {kind.name: kind for kind in GGUF_TYPES}

# What gguf_dequantize.py turns into numbers. The others are known by size, so that the message can name them.
LOADABLE_TYPES: frozenset[str] = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
