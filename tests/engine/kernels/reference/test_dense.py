"""Embedding, norms, linears, feed-forward, rotation and logits of the reference, each against a loop over Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.ops import AdapterBank, Linear
from engine.kernels.reference import ReferenceOps
from engine.models.spec import Activation, RopeSpec

OPS = ReferenceOps()
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: torch.Tensor, expected: list[list[float]], within: float) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=within, rtol=within)


def test_embed_takes_and_scales_rows() -> None:
    table = random(7, 4)
    tokens = torch.tensor([6, 0, 6])
    close(OPS.embed(tokens, table, 2.5), [[2.5 * x for x in table[i].tolist()] for i in tokens.tolist()], 1e-15)
    assert torch.equal(OPS.embed(tokens, table, 1.0), table[[6, 0, 6]])
    assert torch.equal(OPS.take_rows(table, tokens), table[[6, 0, 6]])


@pytest.mark.parametrize(("dtype", "within"), DTYPES)
def test_rms_norm(dtype: torch.dtype, within: float) -> None:
    x, w = random(3, 10, dtype=dtype), random(10, dtype=dtype, seed=1)
    expected = []
    for row in x.tolist():
        size = math.sqrt(sum(v * v for v in row) / 10 + 1e-3)
        expected.append([v / size * s for v, s in zip(row, w.tolist(), strict=True)])
    got = OPS.rms_norm(x, w, 1e-3)
    assert got.dtype == dtype
    close(got, expected, within)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "within"), DTYPES)
def test_layer_norm(dtype: torch.dtype, within: float, bias: bool) -> None:
    x, w = random(3, 10, dtype=dtype) + 4, random(10, dtype=dtype, seed=1)
    b = random(10, dtype=dtype, seed=2) if bias else None
    expected = []
    for row in x.tolist():
        mean = sum(row) / 10
        size = math.sqrt(sum((v - mean) ** 2 for v in row) / 10 + 1e-3)
        added = b.tolist() if b is not None else [0.0] * 10
        expected.append([(v - mean) / size * s + a for v, s, a in zip(row, w.tolist(), added, strict=True)])
    got = OPS.layer_norm(x, w, b, 1e-3)
    assert got.dtype == dtype
    close(got, expected, within)


def naive_linear(x: torch.Tensor, layer: Linear, slots: list[int]) -> list[list[float]]:
    out = []
    for row, slot in zip(x.tolist(), slots, strict=True):
        y = [sum(a * b for a, b in zip(row, weights, strict=True)) for weights in layer.weight.tolist()]
        if layer.bias is not None:
            y = [a + b for a, b in zip(y, layer.bias.tolist(), strict=True)]
        if slot and layer.adapters is not None:
            bank = layer.adapters
            low = [sum(a * b for a, b in zip(row, weights, strict=True)) for weights in bank.a[slot].tolist()]
            high = [sum(a * b for a, b in zip(low, weights, strict=True)) for weights in bank.b[slot].tolist()]
            y = [a + float(bank.scale[slot]) * b for a, b in zip(y, high, strict=True)]
        out.append(y)
    return out


def make_linear(out: int, into: int, seed: int, bias: bool = True, adapters: bool = True) -> Linear:
    bank = None
    if adapters:
        bank = AdapterBank(random(3, 2, into, seed=seed + 1), random(3, out, 2, seed=seed + 2), random(3, seed=seed + 3))
        bank.a[0] = bank.b[0] = bank.scale[0] = torch.nan  # slot 0 is never read
    return Linear(random(out, into, seed=seed), random(out, seed=seed + 4) if bias else None, bank)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slots", [None, [0, 0, 0, 0], [0, 2, 1, 2]])
def test_linear_with_adapters(slots: list[int] | None, bias: bool) -> None:
    x, layer = random(4, 6, seed=50), make_linear(5, 6, 0, bias)
    given = None if slots is None else torch.tensor(slots)
    expected = naive_linear(x, layer, slots or [0] * 4)
    close(OPS.linear(x, layer, given), expected, 1e-12)
    residual = random(4, 5, seed=60)
    added = [[a + b for a, b in zip(r, e, strict=True)] for r, e in zip(residual.tolist(), expected, strict=True)]
    close(OPS.linear_add(x, layer, residual.clone(), given), added, 1e-12)


def test_slots_without_adapters_change_nothing() -> None:
    x, layer = random(4, 6), make_linear(5, 6, 0, adapters=False)
    assert torch.equal(OPS.linear(x, layer, torch.tensor([0, 1, 2, 1])), OPS.linear(x, layer, None))


def test_project_qkv_is_three_linears() -> None:
    x, slots = random(4, 6, seed=50), [1, 0, 2, 1]
    layers = [make_linear(n, 6, 10 * n) for n in (8, 4, 4)]
    for got, layer in zip(OPS.project_qkv(x, *layers, torch.tensor(slots)), layers, strict=True):
        close(got, naive_linear(x, layer, slots), 1e-12)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_feed_forward(name: Activation) -> None:
    x, slots, act = random(4, 6, seed=50), [1, 0, 2, 1], ACTIVATIONS[name]
    gate, up = make_linear(7, 6, 0), make_linear(7, 6, 100)
    g, u = naive_linear(x, gate, slots), naive_linear(x, up, slots)
    expected = [[act(a) * b for a, b in zip(p, q, strict=True)] for p, q in zip(g, u, strict=True)]
    close(OPS.gated(x, gate, up, name, torch.tensor(slots)), expected, 1e-12)
    close(OPS.activated(x, up, name, torch.tensor(slots)), [[act(a) for a in row] for row in u], 1e-12)


@pytest.mark.parametrize("dim", [8, 4, 2])
def test_rotate(dim: int) -> None:
    rope = RopeSpec("default", dim, tuple(0.7 / (i + 1) for i in range(dim // 2)), attention_factor=1.3)
    positions = torch.tensor([0, 5, 100_000])
    x = random(3, 2, 8)
    cos, sin = OPS.rope_tables(positions, rope, torch.float64)
    expected = x.clone()
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for i, f in enumerate(rope.inverse_frequencies):
                a, b = float(x[t, head, i]), float(x[t, head, i + dim // 2])
                c, s = math.cos(position * f) * 1.3, math.sin(position * f) * 1.3
                expected[t, head, i], expected[t, head, i + dim // 2] = a * c - b * s, a * s + b * c
    torch.testing.assert_close(OPS.rotate(x, cos, sin), expected, atol=1e-12, rtol=0)


def test_rope_tables_are_exact_far_out_in_float32() -> None:
    rope = RopeSpec("default", 2, (1.0,))
    cos, _ = OPS.rope_tables(torch.tensor([1_000_003]), rope, torch.float32)
    assert cos.dtype == torch.float32
    assert float(cos) == pytest.approx(math.cos(1_000_003), abs=1e-7)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits(softcap: float | None) -> None:
    x, head, slots = random(4, 6, seed=50), make_linear(9, 6, 0, bias=False), [0, 2, 1, 2]
    y = [[2.0 * v for v in row] for row in naive_linear(x, head, slots)]
    expected = [[softcap * math.tanh(v / softcap) if softcap else v for v in row] for row in y]
    close(OPS.logits(x, head, 2.0, softcap, torch.tensor(slots)), expected, 1e-12)


def test_logits_are_wide() -> None:
    head = Linear(random(9, 6, dtype=torch.bfloat16))
    assert OPS.logits(random(2, 6, dtype=torch.bfloat16), head, 1.0, None, None).dtype == torch.float32


def test_finite() -> None:
    rows = torch.tensor([[1.0, 5.0, 5.0], [torch.nan, 0.0, 1.0], [0.0, -torch.inf, 9.0], [0.0, 0.0, 0.0]])
    assert OPS.finite(rows).tolist() == [True, False, False, True]
