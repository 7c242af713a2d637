"""Fixtures for the whole suite: where the real files are, and one retry for tests that bound a duration.

The files are put into the cache folder by ./tests/run; a missing one is an error here, never a silent skip.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

REAL_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA_CPP_SDIST = "llama_cpp_python-0.3.36.tar.gz"


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, which children inherit: then Ctrl-C could not be tested."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """The folder that ./tests/run fills: real model, tokenizer corpus, cached oracle results."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavectl-tests"
    return Path(os.environ.get("CAVECTL_TEST_CACHE") or default)


def _cached(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        pytest.fail(f"{name} is not in the test cache: run ./tests/run once, it downloads what the tests need", pytrace=False)
    return path


@pytest.fixture(scope="session")
def real_model_path(test_cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF, the default model."""
    return _cached(test_cache, REAL_MODEL)


@pytest.fixture(scope="session")
def llama_cpp_sdist(test_cache: Path) -> Path:
    """The source package of llama-cpp-python 0.3.36: vocabularies with expected ids, and chat templates."""
    return _cached(test_cache, LLAMA_CPP_SDIST)
