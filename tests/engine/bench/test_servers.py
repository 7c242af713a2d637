"""The servers of a comparison: ours with a tiny model, llama-server played by a script; both are gone afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from engine.bench import comparison_parts, http_load, servers
from engine.bench.comparison_parts import Plan
from engine.bench.sides import Ours, Theirs
from tests.engine.bench.virtual_subject import said
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

LLAMA_SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if "{broken}":
    sys.exit(9)
port = int(sys.argv[sys.argv.index("--port") + 1])
loaded = time.monotonic() + 0.1

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(200 if time.monotonic() > loaded else 503)
        self.end_headers()
        for _ in range(count):
            self.wfile.write(b'data: {{"choices": [{{"text": "a"}}]}}\\n\\n')
        self.wfile.write(b'data: {{"choices": [], "usage": {{"completion_tokens": %d}}}}\\n\\n' % count)

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_rand(context_tokens=256).save(tmp_path_factory.mktemp("servers") / "tiny")
    write_tiny_tok(folder)
    return folder


def llama_server(folder: Path, broken: str = "") -> str:
    program = folder / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable, broken=broken))
    program.chmod(0o755)
    return str(program)


def test_ours(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVECTL_PORT", "off")
    with servers.our_home(str(tiny), 1) as home:
        assert servers.our_cold_start_s(home) > 0
        with servers.our_server(home) as address:
            answer = http_load.ask(address, [7, 8, 9], 5)
            assert answer.tokens == 5 and 0 < answer.first_s <= answer.end_s
            worker = psutil.Process(servers.our_worker_pid(home))
            assert worker.is_running()
        assert not worker.is_running()
        with pytest.raises(RuntimeError, match="no model in memory"):
            servers.our_worker_pid(home)
    assert not home.folder.exists()


def test_a_model_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cavectl import failed"), servers.our_home(str(tmp_path / "none.gguf"), 1):
        pytest.fail("there is nothing to measure")


def test_theirs(tmp_path: Path) -> None:
    program = llama_server(tmp_path)
    with servers.llama_server(program, "m.gguf", 1, 2, 64) as address:
        (child,) = (child for child in psutil.Process().children() if program in child.cmdline())
        assert http_load.ask(address, [1], 3).tokens == 3
    assert not child.is_running()
    assert servers.llama_cold_start_s(program, "m.gguf", 1) >= 0.1


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="llama-server did not start"):
        servers.llama_cold_start_s(llama_server(tmp_path, broken="yes"), "m.gguf", 1)


@pytest.fixture
def plan(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """One round of small requests."""
    monkeypatch.setattr(comparison_parts, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(comparison_parts, "CLIENT_TOKENS", 4)
    monkeypatch.setattr(comparison_parts, "PROMPT_IDS", range(290, 320))
    return Plan(
        ours=Ours(str(tiny), 1),
        theirs=Theirs("no-such-python", str(tiny), 1),
        theirs_q4_0=None,
        llama_server=llama_server(tmp_path),
        text=None,
        rounds=1,
        say=said,
    )


def test_the_rows_over_http(plan: Plan) -> None:
    rows, details = comparison_parts.http(plan)
    assert all(row.ratio is not None and not row.why for row in rows), [row.why for row in rows]
    assert details["resident"]["bytes"] > 1 << 20


def test_the_row_of_cold_starts(plan: Plan) -> None:
    (row,), _ = comparison_parts.cold(plan)
    assert row.ours is not None and row.theirs is not None and row.verdict in ("met", "MISSED")


def test_the_row_of_memory(plan: Plan) -> None:
    (row,), details = comparison_parts.memory(plan)
    assert row.ours is not None and row.most is not None, row.why
    assert details["resident_bytes"] > 1 << 20 and details["kv_bytes"] > 0
