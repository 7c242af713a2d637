"""The first argument of `run`: a model, or the first word of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from cavectl.names import DEFAULT_MODEL
from cavectl.target import split_target
from daemon.store.catalog import load_catalog
from daemon.store.names import parse_model_name
from engine.errors import ModelNotFound

KNOWN = ["smollm2:135m", "mine:latest", "alice/poet:latest"]


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        ([], DEFAULT_MODEL, []),
        (["Why is the sky blue?"], DEFAULT_MODEL, ["Why is the sky blue?"]),
        (["Why", "is", "it"], DEFAULT_MODEL, ["Why", "is", "it"]),
        (["smollm2:135m"], "smollm2:135m", []),
        (["smollm2:135m", "Why", "so?"], "smollm2:135m", ["Why", "so?"]),
        (["smollm2", "Why"], "smollm2:135m", ["Why"]),
        (["nosuch:tag", "Why"], "nosuch:tag", ["Why"]),
        (["hf.co/owner/repo:Q4_K_M", "Why"], "hf.co/owner/repo:Q4_K_M", ["Why"]),
        (["alice/poet", "Why"], "alice/poet", ["Why"]),
        (["mine", "Why"], "mine:latest", ["Why"]),
        (["MINE", "Why"], "mine:latest", ["Why"]),
        (["模型:é", "Why"], "模型:é", ["Why"]),
        (["Translate:", "hello"], DEFAULT_MODEL, ["Translate:", "hello"]),
        (["what?/that", "is"], DEFAULT_MODEL, ["what?/that", "is"]),
        (["/etc is what?"], DEFAULT_MODEL, ["/etc is what?"]),
        (["-", "x"], DEFAULT_MODEL, ["-", "x"]),
        (["", "x"], DEFAULT_MODEL, ["", "x"]),
    ],
)
def test_split(words: list[str], model: str, prompt: list[str]) -> None:
    assert split_target(words, lambda: KNOWN) == (model, prompt)


def test_a_path_that_exists_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "Ж é 模型 1.gguf"
    path.touch()
    assert split_target([str(path), "Why"], lambda: KNOWN) == (str(path), ["Why"])


@pytest.mark.parametrize("word", ["smollm", "smolm2", "min", "poett", "/no/such/file.gguf", "./x.gguf"])
def test_what_is_nearly_a_model_is_refused(word: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        split_target([word, "Why"], lambda: KNOWN)
    assert "--model" in caught.value.hint


def test_names_are_only_asked_for_when_they_matter() -> None:
    def fail() -> list[str]:
        raise AssertionError("asked")

    split_target(["Why is it?"], fail)
    split_target(["a:b", "x"], fail)


def test_the_default_model_is_in_the_catalog_under_its_family_too() -> None:
    entry = load_catalog().find(parse_model_name(DEFAULT_MODEL.partition(":")[0]))
    assert entry is not None
    assert entry.name == DEFAULT_MODEL
