"""`python -m engine.inspect PATH`: says what a model is, without loading it.

Prints one msgpack ModelInfo on stdout and exits 0, or one msgpack ErrorInfo and exits 1. It is a process of its own because the
file is not trusted: the daemon runs it under a memory limit and a time limit. Invariant: no torch, no numpy, no weight read.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import CavectlError, ErrorInfo
from engine.types import ModelInfo


def inspect_model(path: str | Path) -> ModelInfo:
    """ModelInfo of a .gguf file or a folder. Raises CorruptFile, UnsupportedModel, ModelNotFound."""
    if os.path.isdir(path):
        from engine.weights.safetensors import SafetensorsSource

        source = SafetensorsSource(path)
    else:
        from engine.weights.gguf_source import GgufSource

        source = GgufSource(path)
    source.close()
    return source.info


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (options.memory_limit_bytes,) * 2)
        answer = msgspec.msgpack.encode(inspect_model(options.path))
        code = 0
    except CavectlError as error:
        answer, code = msgspec.msgpack.encode(error.info), 1
    except MemoryError:
        answer, code = msgspec.msgpack.encode(ErrorInfo("out_of_memory", "reading the model takes more memory than allowed")), 1
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.inspect", description="Say what a model file or folder holds.")
    parser.add_argument("path", help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("--memory-limit-bytes", type=int, help="limit of the address space")
    return parser


if __name__ == "__main__":
    sys.exit(main())
