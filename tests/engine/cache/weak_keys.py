"""Keys whose hashes collide all the time: whoever trusts a hash takes one page for another (S28)."""

from __future__ import annotations

import pytest

from engine.cache import manager, matching, radix


class WeakKey(bytes):
    """Bytes with a hash of 4 bits. A piece of one is one, so that what is looked up hashes like what was put in."""

    def __hash__(self) -> int:
        return sum(self) & 15

    def __getitem__(self, at: slice) -> WeakKey:  # pyright: ignore[reportIncompatibleMethodOverride]
        return WeakKey(super().__getitem__(at))


def weaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the whole cache use weak keys."""
    strong = radix.key_of
    for module in (radix, matching, manager):
        monkeypatch.setattr(module, "key_of", lambda tokens: WeakKey(strong(tokens)))
