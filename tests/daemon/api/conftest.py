"""A tiny model on disk, and one daemon with the scripted engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.scripted import Scripted, scripted_daemon
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TinyRand with TinyTok, a context of 64 tokens."""
    folder = tiny_rand(context_tokens=64).save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    return folder


@pytest.fixture(scope="session")
def session_daemon(tiny_model: Path) -> Iterator[Scripted]:
    with scripted_daemon(tiny_model, ping_interval_s="0.4", max_queue="8") as scripted:
        yield scripted


@pytest.fixture
def daemon(session_daemon: Scripted) -> Scripted:
    """The shared daemon with nothing loaded; give it a script first."""
    session_daemon.unload()
    return session_daemon
