"""A CPU worker where torch and numpy cannot be imported: it loads, answers in every way, and says what needs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.process import ROOT
from tests.fixtures.tiny_rand import tiny_rand

PROGRAM = """
import json, sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Refusing())
import msgspec
from engine.types import EngineRequest, SamplingParams, WorkerConfig
from engine import worker
from engine.errors import CavectlError

config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
try:
    built = worker._build_model(config, lambda stage, fraction: None)
except CavectlError as error:
    print(json.dumps({"refused": error.message, "hint": error.hint}))
    raise SystemExit
engine = built.engine
prompt = list(range(20, 60))
engine.add(EngineRequest(id=1, prompt=prompt, max_tokens=12, n=2, logprobs=3, sampling=SamplingParams(seed=5, top_p=0.9)))
engine.add(EngineRequest(id=2, prompt=prompt[:7], max_tokens=12, sampling=SamplingParams(temperature=0.0)))
tokens, tops = {}, 0
while engine.has_work:
    for output in engine.step().outputs:
        assert output.error is None, output.error
        tokens.setdefault(f"{output.request}.{output.choice}", []).extend(token.id for token in output.tokens)
        tops += sum(len(token.top) == 3 for token in output.tokens)
engine.check()
loaded = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "triton"})
print(json.dumps({"tokens": tokens, "tops": tops, "loaded": loaded, "info": msgspec.to_builtins(built.info)}))
"""


def _run(**config: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps({"threads": 2, "context_tokens": 256, **config})],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kv_dtype", ["auto", "float32", "int8"])
def test_a_model_answers_without_torch_and_numpy(real_model_path: Path, kv_dtype: str) -> None:
    seen = _run(model_path=str(real_model_path), format="gguf", kv_dtype=kv_dtype)
    assert seen["loaded"] == [] and seen["info"]["backend"] == "cpu" and seen["info"]["degraded"] == []
    assert {name: len(ids) for name, ids in seen["tokens"].items()} == {"1.0": 12, "1.1": 12, "2.0": 12}
    assert seen["tops"] == 24 and seen["tokens"]["1.0"] != seen["tokens"]["1.1"]


def test_what_needs_torch_says_what_brings_it(tmp_path: Path) -> None:
    folder = tiny_rand(1).save(tmp_path / "tiny")
    refused = _run(model_path=str(folder), format="safetensors", backend="reference")
    assert refused == {
        "refused": "the reference backend needs torch, which is not installed",
        "hint": "./install.sh --with-torch brings it",
    }
