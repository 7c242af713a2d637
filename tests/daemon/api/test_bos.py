"""B04: exactly one BOS id, whether the tokenizer adds it, the template prints it, both do, or the user types it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.scripted import Scripted, shown, spelled
from tests.fixtures.tiny_tok import BOS, CHATML, SPECIALS

ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
}


@pytest.fixture(params=["template without", "template prints it"])
def model(session_daemon: Scripted, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The tiny model with a tokenizer that opens each input with BOS."""
    folder = shutil.copytree(tiny_model, tmp_path / "bos")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": ADDS_BOS}))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    if request.param == "template prints it":
        config["chat_template"] = "{{ bos_token }}" + CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    session_daemon.script(spelled("x"))
    assert session_daemon.post("/api/import", {"path": str(folder), "name": "tiny/bos", "mode": "copy"}).status == 200
    yield "tiny/bos"
    session_daemon.unload()
    session_daemon.post("/api/delete", {"model": "tiny/bos"}, method="DELETE")


def test_b04_one_bos(session_daemon: Scripted, model: str) -> None:
    daemon = session_daemon
    daemon.script(spelled("x"))
    for prompt in ("q", f"{SPECIALS[BOS]}q"):
        assert daemon.post("/v1/completions", {"model": model, "prompt": prompt}).status == 200
    assert daemon.post("/api/generate", {"model": model, "prompt": "q", "raw": True, "stream": False}).status == 200
    for content in ("q", "<s>q"):
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": False}
        assert daemon.post("/v1/chat/completions", body).status == daemon.post("/api/chat", body).status == 200
    prompts = [event["request"]["prompt"] for event in daemon.events("add")]
    assert len(prompts) == 7 and all(ids.count(BOS) == 1 and ids[0] == BOS for ids in prompts)
    assert [shown(ids) for ids in prompts[:3]] == ["[<s>]q"] * 3
    assert shown(prompts[5]).startswith("[<s>][<|im_start|>]user\n<s>q[<|im_end|>]"), "typed in a chat it is text"


def test_b04_no_bos_where_the_model_has_none(session_daemon: Scripted) -> None:
    session_daemon.script(spelled("x"))
    session_daemon.chat()
    session_daemon.complete("q")
    assert all(BOS not in event["request"]["prompt"] for event in session_daemon.events("add"))
