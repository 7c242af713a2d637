"""`python -m engine.pack PATH --target FILE --digest DIGEST`: makes the packed weights of a model.

Prints one msgpack PackReport on stdout and exits 0, or one msgpack ErrorInfo and exits 1. It is a process of its own because the
weights are not trusted: the daemon runs it under a memory limit and a time limit. A target that is fresh is left as it is.
Invariant: no torch, no numpy; the target appears whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import CavectlError, ErrorInfo, UnsupportedModel
from engine.models.families import family_for
from engine.runtime.native_plan import unsupported
from engine.types import PackReport
from engine.weights.packed import PackedFile, open_fresh, pack
from engine.weights.source import WeightSource, open_source
from engine.weights.tensor_set import wanted_parameters


def pack_model(path: str, target: Path, digest: str, keep_free_bytes: int = 0) -> PackReport:
    """Raises CorruptFile, UnsupportedModel, ModelNotFound for the model, CavectlError when the target cannot be written."""
    started = time.monotonic()
    source = open_source(path, "safetensors" if os.path.isdir(path) else "gguf")
    try:
        packed, made = _packed(source, os.path.basename(path), target, digest, keep_free_bytes)
        notes, size = packed.notes, len(packed.data)
        packed.close()
        return PackReport(
            made=made,
            source_bytes=source.info.weight_bytes,
            packed_bytes=size,
            pack_ms=(time.monotonic() - started) * 1e3,
            notes=notes,
        )
    finally:
        source.close()


def _packed(source: WeightSource, name: str, target: Path, digest: str, keep_free_bytes: int) -> tuple[PackedFile, bool]:
    """The packed file, and whether it was made."""
    family = family_for(source.info.architecture)
    spec = family.spec(source.info.config, None)
    if reasons := unsupported(spec, "float16"):
        raise UnsupportedModel(f"the CPU backend does not run {', '.join(reasons)}")
    parameters = family.parameters(spec)
    if fresh := open_fresh(target, digest, wanted_parameters(source.tensors, parameters)):
        return fresh, False
    pack(
        source,
        spec,
        parameters,
        target,
        source_digest=digest,
        source_name=name,
        keep_free_bytes=keep_free_bytes,
        progress=lambda _stage, _fraction: None,
    )
    return PackedFile.open(target, digest), True


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (options.memory_limit_bytes,) * 2)
        report = pack_model(options.path, options.target, options.digest, options.keep_free_bytes)
        answer, code = msgspec.msgpack.encode(report), 0
    except CavectlError as error:
        answer, code = msgspec.msgpack.encode(error.info), 1
    except MemoryError:
        answer, code = msgspec.msgpack.encode(ErrorInfo("out_of_memory", "packing takes more memory than allowed")), 1
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.pack", description="Make the packed weights of a model.")
    parser.add_argument("path", help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("--target", type=Path, required=True, help="the packed file, replaced unless it is fresh")
    parser.add_argument("--digest", required=True, help="of the weights' bytes: a packed file with another one is stale")
    parser.add_argument("--keep-free-bytes", type=int, default=0, help="space on the disk that is to be left")
    parser.add_argument("--memory-limit-bytes", type=int, help="limit of the address space")
    return parser


if __name__ == "__main__":
    sys.exit(main())
