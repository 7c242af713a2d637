"""Damaged GGUF files: whatever happens to the bytes of a sound file, only the typed errors escape (S07).

The damaged file goes all the way: structure, config, vocabulary, and the tensors that opening promised are there. 5 seconds
by default, 60 under `full`; the seed is printed when it fails.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from engine.errors import CorruptFile, UnsupportedModel
from engine.weights.gguf_source import GgufSource
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand

VOCAB = 24
HEADER_BYTES = 1900


@pytest.fixture(scope="module")
def sound() -> bytes:
    model = tiny_rand(vocab=VOCAB, width=8, heads=2, kv_heads=1, ffn=8, layers=1)
    data = gguf_bytes(llama_gguf(model.config, model.tensors, byte_vocabulary(VOCAB)))
    assert 4096 <= len(data) <= 6144
    return data


def _damage(data: bytes, random_: random.Random) -> bytes:
    """One to three of: a byte set, a bit flipped, eight bytes made extreme, a piece doubled or taken out, the end cut off."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(min(HEADER_BYTES, len(out)) if random_.random() < 0.9 else len(out))
        kind = random_.randrange(6)
        if kind == 0:
            out[at] = random_.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << random_.randrange(8)
        elif kind == 2:
            out[at : at + 8] = random_.choice((0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 3:
            out[at:at] = out[at : at + random_.randint(1, 64)]
        elif kind == 4:
            del out[at : at + random_.randint(1, 64)]
        else:
            del out[random_.randrange(len(out) + 1) :]
        if not out:
            break
    return bytes(out)


def _open_and_read(path: Path) -> bool:
    try:
        source = GgufSource(path)
    except (CorruptFile, UnsupportedModel):
        return False
    for name, info in source.tensors.items():
        assert source.load(name).shape == info.shape
    source.close()
    return True


def _fuzz(path: Path, sound: bytes, seconds: float) -> None:
    seed = random.SystemRandom().randrange(2**32)
    opened = tried = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        damaged = _damage(sound, random.Random(f"{seed} {tried}"))
        path.write_bytes(damaged)
        try:
            opened += _open_and_read(path)
        except BaseException:
            print(f"seed {seed} {tried}")
            raise
        tried += 1
    assert tried > 100
    assert 0 < opened < tried, "the damage is either never or always noticed: it hits nothing"


def test_the_undamaged_file_opens(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    assert _open_and_read(path)


def test_only_typed_errors_escape(tmp_path: Path, sound: bytes) -> None:
    _fuzz(tmp_path / "model.gguf", sound, 5.0)


@pytest.mark.full
def test_only_typed_errors_escape_for_a_minute(tmp_path: Path, sound: bytes) -> None:
    _fuzz(tmp_path / "model.gguf", sound, 60.0)
