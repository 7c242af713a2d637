"""What a page of each group holds, against sums by hand."""

from __future__ import annotations

import pytest

from engine.cache.layout import KvDtype, cache_layout
from tests.fixtures.tiny_recurrent import HEAD_DIM, KV_HEADS, STATE, tiny_recurrent

SIZES: dict[KvDtype, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def test_layers_that_keep_the_same_share_a_group_in_the_order_of_their_first() -> None:
    groups = cache_layout(tiny_recurrent("recurrence", "20", "full", "recurrence", "8", "20").spec, "float32").groups
    assert [(group.kind, group.window_tokens, group.layers) for group in groups] == [
        ("state", None, (0, 3)),
        ("window", 20, (1, 5)),
        ("full", None, (2,)),
        ("window", 8, (4,)),
    ]


@pytest.mark.parametrize("kv_dtype", SIZES)
def test_bytes_of_a_page(kv_dtype: KvDtype) -> None:
    layout = cache_layout(tiny_recurrent("full", "recurrence", "recurrence").spec, kv_dtype)
    full, state = layout.groups
    scales = 2 * 16 * KV_HEADS * 2 if kv_dtype == "int8" else 0
    assert full.bytes_per_page == 2 * 16 * KV_HEADS * HEAD_DIM * SIZES[kv_dtype] + scales
    assert layout.bytes_per_token == full.bytes_per_page // 16, "a state does not grow with its sequence"
    assert state.bytes_per_page == 2 * STATE * (8 if kv_dtype == "float64" else 4), "a state is never narrower than float32"
