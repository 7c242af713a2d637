"""The speculation benchmark: its prompts are what they claim to be, its figures add up; short, on the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemon.text.tokenizer import load_tokenizer
from engine.bench import speculation
from engine.bench.timing import spread
from engine.weights.source import open_source
from tests.fixtures.tiny_rand import tiny_rand

DOCUMENT = json.loads(speculation.PROMPTS.read_text(encoding="utf-8"))


def test_prompts_are_the_tokens_of_their_texts(real_model_path: Path) -> None:
    source = open_source(str(real_model_path), "gguf")
    tokenizer = load_tokenizer(real_model_path, source.info)
    source.close()
    for prompts in DOCUMENT["sets"].values():
        for prompt in prompts:
            assert tokenizer.encode(prompt["text"], add_special=False, parse_special=True) == prompt["ids"]


def test_inductions_are_a_passage_twice_and_begun_again() -> None:
    texts = [prompt["text"] for prompt in DOCUMENT["sets"]["induction"]]
    assert len(texts) == 20
    for text in texts:
        middle = next(
            at for at in range(len(text) // 3, len(text)) if text[at : at + 2] == "\n\n" and text[at + 2 :].startswith(text[:at])
        )
        passage, rest = text[:middle], text[2 * middle + 4 :]
        assert 60 <= len(passage.split()) <= 120 and rest and passage.startswith(rest)


def test_a_short_run(real_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    short = ["--rounds", "1", "--tokens", "24", "--prompts", "2", "--pairs", "3", "--threads", "2", "--json", str(target)]
    assert speculation.main([str(real_model_path), *short]) == 0
    out = capsys.readouterr().out
    document = json.loads(target.read_text(encoding="utf-8"))
    assert [of["name"] for of in document["sets"]] == ["induction", "edit", "chat", "random"]
    assert all(of["prompts"] == 2 and of["tokens"] == 46 and of["ratio"] > 0 for of in document["sets"])
    assert document["sets"][0]["accepted"] > 10
    assert document["pairs"]["low"] <= document["pairs"]["ratio"] <= document["pairs"]["high"]
    assert "induction" in out and "QUICK: not to be compared" in out and "3 pairs" in out


def test_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speculation.main([str(tiny_rand().save(tmp_path / "tiny"))]) == 1
    assert "49152 different ones; this model has 320" in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "verdict"), [(1.8, "met"), (1.79, "MISSED")])
def test_verdicts(ratio: float, verdict: str) -> None:
    fields = {"prompts": 1, "of_prompts": spread([1.0]), "off_tokens_per_s": 1.0, "on_tokens_per_s": 1.0}
    found = speculation.SetResult(name="x", ratio=ratio, drafted=0, accepted=0, tokens=1, least=1.8, **fields)
    assert found.verdict == verdict
