"""Matrix products, feed-forward, norms and rotations of every instruction set against the reference in float64, and to the bit
against the scalar one.

Tolerances: a product with given int8 activations, and every float product, 1e-5 of sum |x w|; what rounding activations to int8 may
add is bounded by half a step of each block, times sum |w|.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.ops import Linear
from engine.kernels.reference.linear import linear
from engine.kernels.reference.mlp import activated, gated
from engine.kernels.reference.norm import rms_norm as reference_norm
from engine.kernels.reference.rope import rotate as reference_rotate
from engine.models.spec import Activation
from engine.weights.packed_layout import Kind
from tests.engine.kernels.cpu import op_calls as ops
from tests.engine.kernels.cpu.op_calls import FLOAT_KINDS, INTEGER_KINDS, PackedMatrix, random_matrix
from tests.engine.kernels.cpu.packed_calls import BITS, Refused

KINDS = (*FLOAT_KINDS, *INTEGER_KINDS)
SHAPES = [(1, 32), (7, 64), (24, 576), (37, 576), (100, 96)]
TOKENS = [*range(1, 18), 31, 32, 33]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")  # in the order of kernels.h
SUM_TOLERANCE = 1e-5


def random_inputs(tokens: int, columns: int, seed: int = 1) -> Tensor:
    """Tokens of different sizes, as a residual stream has them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator) * torch.logspace(-2, 1, tokens)[:, None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def dequantised(x: Tensor) -> Tensor:
    q, scales = ops.quantise(x)
    return (q.double().unflatten(1, (-1, 32)) * scales.double()[..., None]).flatten(1)


def product(x: Tensor, w: PackedMatrix) -> tuple[Tensor, Tensor]:
    """x float64 times the weights, with the bias, and sum |x w|."""
    bias = None if w.bias is None else w.bias.double()
    return linear(x, Linear(w.weights, bias), None), x.abs() @ w.weights.abs().T + (0 if bias is None else bias.abs())


def seen(w: PackedMatrix, x: Tensor) -> Tensor:
    """What the kernel multiplies by: integer kinds see activations as int8."""
    return dequantised(x) if w.kind in INTEGER_KINDS else x.double()


def quantisation_bound(x: Tensor, w: PackedMatrix) -> Tensor:
    """How far a product may be from that of the float activations: half a step in each block of 32, times sum |w|."""
    _, scales = ops.quantise(x)
    return scales.double() / 2 @ w.weights.abs().unflatten(1, (-1, 32)).sum(2).T


def within(got: Tensor, want: Tensor, bound: Tensor) -> bool:
    return bool(((got.double() - want).abs() <= bound).all())


# --- products ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_those_of_the_reference(kind: Kind, rows: int, columns: int) -> None:
    w, x = random_matrix(kind, rows, columns, bias=rows % 2 == 1), random_inputs(33, columns)
    got = ops.matmul(w, x)
    want, size = product(seen(w, x), w)
    assert within(got, want, SUM_TOLERANCE * size)
    assert not within(got * (1 + 1e-3), want, SUM_TOLERANCE * size)  # the bound can fail
    if kind in INTEGER_KINDS:
        exact, size = product(x.double(), w)
        bound = quantisation_bound(x, w) + SUM_TOLERANCE * size
        assert within(got, exact, bound)
        assert not within(got, exact, bound / 10) or columns == 32


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_exponent_scales_the_product_exactly(kind: Kind) -> None:
    x = random_inputs(3, 64)
    plain, scaled = (ops.matmul(random_matrix(kind, 20, 64, exponent=n), x) for n in (0, 5))
    assert same_bits(scaled, plain / 32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_added_to_what_is_there(kind: Kind) -> None:
    w, x = random_matrix(kind, 37, 96, bias=True), random_inputs(9, 96)
    before = random_inputs(9, 37, seed=4)
    assert same_bits(ops.matmul(w, x, add=before), before + ops.matmul(w, x))


@pytest.mark.parametrize("columns", [1, 7, 15, 33, 577])
@pytest.mark.parametrize("kind", FLOAT_KINDS, ids=lambda kind: kind.name)
def test_float_kinds_take_any_number_of_columns(kind: Kind, columns: int) -> None:
    w, x = random_matrix(kind, 19, columns), random_inputs(5, columns)
    want, size = product(x.double(), w)
    assert within(ops.matmul(w, x), want, SUM_TOLERANCE * size)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(37, 576), (16, 32)])
def test_every_instruction_set_gives_the_bits_of_the_scalar_one(kind: Kind, rows: int, columns: int) -> None:
    w, x = random_matrix(kind, rows, columns, bias=True, exponent=-1), random_inputs(33, columns)
    want = ops.matmul(w, x, isa="scalar")
    for isa in ops.isas():
        assert same_bits(ops.matmul(w, x, isa=isa), want), isa


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_token_gets_the_same_bits_in_any_company_and_any_cut(kind: Kind) -> None:
    w, x = random_matrix(kind, 75, 96, bias=True), random_inputs(33, 96)
    for isa in ops.isas():
        whole = ops.matmul(w, x, isa=isa)
        for tokens in TOKENS:
            assert same_bits(ops.matmul(w, x[:tokens], isa=isa), whole[:tokens]), (isa, tokens)
            assert same_bits(ops.matmul(w, x[33 - tokens :], isa=isa), whole[33 - tokens :]), (isa, tokens)
        for run in (1, 2, 3, 4):
            assert same_bits(ops.matmul(w, x, isa=isa, run=run), whole), (isa, run)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_token_that_is_no_number_spoils_itself_alone(kind: Kind, wrong: float) -> None:
    w, x = random_matrix(kind, 20, 96), random_inputs(9, 96)
    spoilt = x.clone()
    spoilt[4, 50] = wrong
    for isa in ops.isas():
        clean, got = ops.matmul(w, x, isa=isa), ops.matmul(w, spoilt, isa=isa)
        others = torch.arange(9) != 4
        assert same_bits(got[others], clean[others])
        assert not got[4].isfinite().any()


@pytest.mark.parametrize("kind", INTEGER_KINDS, ids=lambda kind: kind.name)
def test_the_largest_integers_do_not_overflow(kind: Kind) -> None:
    """Every stored number and every activation at its end: the dot products are as far from zero as they can be."""
    w = random_matrix(kind, 16, 576)
    numbers = w.packed.view(18, -1)
    numbers[:, : 16 * 32 * BITS[kind] // 8] = 255
    for sign in (1.0, -1.0):
        x = torch.full((5, 576), sign)
        want, size = product(seen(w, x), w)
        for isa in ops.isas():
            assert within(ops.matmul(w, x, isa=isa), want, SUM_TOLERANCE * size), isa


def test_bad_calls_are_refused_with_a_line() -> None:
    x, w = random_inputs(2, 64), random_matrix(Kind.Q8_S, 16, 64)
    with pytest.raises(Refused, match="instruction set"):
        ops.matmul(w, x, isa="mmx")
    with pytest.raises(Refused, match="counts"):
        ops.matmul(w, x[:0])
    with pytest.raises(Refused, match="packed bytes"):
        ops.matmul(PackedMatrix(w.kind, 17, 64, 0, w.packed, None), x)
    with pytest.raises(Refused, match="different shapes"):
        ops.feed(random_matrix(Kind.F32, 15, 64), w, 0, x)
    with pytest.raises(Refused, match="activation"):
        ops.feed(None, w, 4, x)


# --- int8 activations -------------------------------------------------------------------------------------------------------------


def test_int8_activations_are_the_nearest_ones() -> None:
    x = random_inputs(40, 576)
    q, scales = ops.quantise(x)
    blocks, wide = x.double().unflatten(1, (-1, 32)), q.double().unflatten(1, (-1, 32))
    assert torch.allclose(scales.double(), blocks.abs().amax(2) / 127, rtol=1e-6, atol=0)
    assert ((wide * scales.double()[..., None] - blocks).abs() <= 0.50001 * scales.double()[..., None]).all()
    assert (wide.abs().amax(2) == 127).all()


def test_int8_activations_of_nothing_and_of_no_numbers() -> None:
    x = torch.zeros(1, 160)
    x[0, 32:64], x[0, 64], x[0, 96], x[0, 128] = 1e-31, torch.nan, torch.inf, 3.0
    q, scales = ops.quantise(x)
    assert not q[0, :128].any()
    assert scales[0, :2].tolist() == [0, 0]
    assert scales[0, 2:4].isnan().all()
    assert q[0, 128] == 127


def test_int8_activations_are_the_same_on_every_instruction_set() -> None:
    x = random_inputs(50, 320)
    x[3, 5], x[4] = torch.nan, 0
    x[5] = torch.arange(320) - 160.0  # many halves between two steps
    q, scales = ops.quantise(x, isa="scalar")
    for isa in ops.isas():
        other_q, other_scales = ops.quantise(x, isa=isa)
        assert torch.equal(other_q, q), isa
        assert same_bits(other_scales.nan_to_num(-1), scales.nan_to_num(-1)), isa


# --- feed-forward -----------------------------------------------------------------------------------------------------------------


def fed(gate: PackedMatrix | None, up: PackedMatrix, activation: Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the reference gives in float64, and how far float32 sums may be from it. No activation is steeper than 1.2."""
    x_up = seen(up, x)
    u, u_size = product(x_up, up)
    linears = Linear(up.weights, None if up.bias is None else up.bias.double())
    if gate is None:
        return activated(x_up, linears, activation, None), 1.2 * SUM_TOLERANCE * u_size
    g, g_size = product(seen(gate, x), gate)
    opened = activated(g, Linear(torch.eye(gate.rows, dtype=torch.float64)), activation, None)
    return opened * u, SUM_TOLERANCE * (1.2 * g_size * u.abs() + opened.abs() * u_size + 1.2 * SUM_TOLERANCE * g_size * u_size)


@pytest.mark.parametrize("activation", range(4), ids=ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_feed_forward_is_that_of_the_reference(kind: Kind, activation: int) -> None:
    gate, up, x = random_matrix(kind, 37, 96, seed=2), random_matrix(kind, 37, 96, seed=3, bias=True), random_inputs(9, 96)
    for gates in (gate, None):
        want, bound = fed(gates, up, ACTIVATIONS[activation], x)
        got = ops.feed(gates, up, activation, x)
        assert within(got, want, bound)
        assert not within(got * 1.01, want, bound)
        for isa in ops.isas():
            assert same_bits(ops.feed(gates, up, activation, x, isa=isa), got), isa


def test_the_reference_of_a_gated_layer_is_what_this_file_says() -> None:
    gate, up, x = random_matrix(Kind.F32, 5, 8, seed=2), random_matrix(Kind.F32, 5, 8, seed=3), random_inputs(4, 8)
    want, _ = fed(gate, up, "silu", x)
    assert torch.allclose(gated(x.double(), Linear(gate.weights), Linear(up.weights), "silu", None), want)


@pytest.mark.parametrize(("one", "other"), [(Kind.Q4_M, Kind.F16), (Kind.BF16, Kind.Q8_S16), (Kind.Q8_M, Kind.Q4_S)])
def test_gate_and_up_may_be_of_different_kinds(one: Kind, other: Kind) -> None:
    gate, up, x = random_matrix(one, 40, 576, bias=True), random_matrix(other, 40, 576, seed=3), random_inputs(17, 576)
    want, bound = fed(gate, up, "silu", x)
    assert within(ops.feed(gate, up, 0, x), want, bound)


@pytest.mark.parametrize("activation", range(4), ids=ACTIVATIONS)
def test_feed_forward_in_any_company_and_any_cut(activation: int) -> None:
    gate, up, x = random_matrix(Kind.Q4_M, 75, 96), random_matrix(Kind.Q4_M, 75, 96, seed=3), random_inputs(33, 96)
    spoilt = x.clone()
    spoilt[20] = torch.nan
    for isa in ops.isas():
        whole = ops.feed(gate, up, activation, x, isa=isa)
        for tokens in TOKENS:
            assert same_bits(ops.feed(gate, up, activation, x[:tokens], isa=isa), whole[:tokens]), (isa, tokens)
        for run in (1, 2, 3):
            assert same_bits(ops.feed(gate, up, activation, x, isa=isa, run=run), whole), (isa, run)
        got = ops.feed(gate, up, activation, spoilt, isa=isa)
        assert got[20].isnan().all()
        others = torch.arange(33) != 20
        assert same_bits(got[others], whole[others])


@pytest.mark.parametrize("activation", range(4), ids=ACTIVATIONS)
def test_activations_over_the_whole_range(activation: int) -> None:
    """One weight of 1: the kernel's own activation, from deep below zero to far above."""
    points = torch.cat([torch.linspace(-120, 120, 4001), torch.logspace(-30, 4, 200), -torch.logspace(-30, 4, 200), torch.zeros(1)])
    one = PackedMatrix(Kind.F32, 1, 1, 0, torch.ones(16).view(torch.uint8), None)
    x = points[:, None].contiguous()
    want = activated(x.double(), Linear(torch.ones(1, 1, dtype=torch.float64)), ACTIVATIONS[activation], None)
    for isa in ops.isas():
        got = ops.feed(None, one, activation, x, isa=isa)
        assert within(got, want, 1e-6 * want.abs() + 1e-15 * x.abs())  # far below zero, 1 + tanh has float64's own rounding
        assert got.isfinite().all()
        assert not within(got * 1.00001, want, 1e-6 * want.abs() + 1e-15 * x.abs())


# --- norms and rotations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 80, 576, 577, 2048])
def test_norms_are_those_of_the_reference(columns: int) -> None:
    x, weight = random_inputs(9, columns), random_inputs(1, columns, seed=5)[0]
    x[3] = 0
    want = reference_norm(x.double(), weight.double(), 1e-5)
    got = ops.rms_norm(x, weight, 1e-5)
    assert within(got, want, 1e-6 * want.abs())
    assert not within(got * 1.0001, want, 1e-6 * want.abs())
    for isa in ops.isas():
        assert same_bits(ops.rms_norm(x, weight, 1e-5, isa=isa), got), isa
    x[5, columns - 1] = torch.nan
    assert ops.rms_norm(x, weight, 1e-5)[5].isnan().all()


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (80, 16), (96, 48), (128, 64), (256, 128), (64, 1), (64, 7)])
def test_rotations_are_those_of_the_reference(head_dim: int, half: int) -> None:
    generator = torch.Generator().manual_seed(6)
    x, angles = torch.randn(head_dim, generator=generator), torch.randn(half, generator=generator) * 100
    cosine, sine = angles.cos(), angles.sin()
    want = reference_rotate(x.double()[None, None], cosine.double()[None], sine.double()[None])[0, 0]
    got = ops.rotate(x, cosine, sine)
    assert within(got, want, 2e-7 * (x.abs().max().double() * 2).expand(head_dim))
    assert torch.equal(got[2 * half :], x[2 * half :])
    assert not torch.equal(got[: 2 * half], x[: 2 * half])
    for isa in ops.isas():
        assert same_bits(ops.rotate(x, cosine, sine, isa=isa), got), isa
