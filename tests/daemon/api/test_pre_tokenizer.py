"""A GGUF that names an unknown pre-tokenizer: refused with the setting that helps, and taken with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.scripted import Scripted, ndjson, scripted_daemon
from tests.fixtures.gguf_writer import ARRAY, I32, STRING, U32, Array, Key, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import EOS, tiny_vocabulary

NAME = "tiny/odd"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_rand(context_tokens=64)
    words = tiny_vocabulary()
    keys = [
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.pre", STRING, "made-up"),
        Key("tokenizer.ggml.tokens", ARRAY, Array(STRING, words.tokens)),
        Key("tokenizer.ggml.token_type", ARRAY, Array(I32, words.token_types)),
        Key("tokenizer.ggml.merges", ARRAY, Array(STRING, words.merges)),
        Key("tokenizer.ggml.eos_token_id", U32, EOS),
    ]
    path = tmp_path_factory.mktemp("odd") / "odd.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors, keys)))
    return path


def take(daemon: Scripted, path: Path) -> None:
    assert ndjson(daemon.post("/api/import", {"path": str(path), "name": NAME}).body)[-1]["status"] == "success"


def test_the_setting_stands_in_for_the_unknown_name(odd: Path, tiny_model: Path, session_daemon: Scripted) -> None:
    take(session_daemon, odd)
    session_daemon.script([0])
    refused = session_daemon.post("/v1/completions", {"model": NAME, "prompt": "a b"})
    session_daemon.post("/api/delete", {"model": NAME}, method="DELETE")
    assert (refused.status, refused.code) == (400, "unsupported_tokenizer") and "made-up" in refused.json["error"]["message"]
    assert "CAVECTL_PRE_TOKENIZER" in refused.json["error"]["hint"]
    with scripted_daemon(tiny_model, pre_tokenizer="gpt-2") as daemon:
        take(daemon, odd)
        daemon.script([0])
        assert daemon.post("/v1/completions", {"model": NAME, "prompt": "a b"}).json["usage"]["prompt_tokens"] == 2
