"""The way into the native library: found or built, loaded with ctypes, every function with its types.

Owned here: where the library lies. An installed package has it beside this file, made by the build hook; a source tree builds it on
first use into a cache folder. Invariant: what `load` gives has the ABI this package was written for. No torch, no numpy.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from engine.errors import CavectlError
from engine.kernels.cpu.build import NAME, SOURCES, BuildError, cached_library

ABI = 2

_P, _I32, _I64, _U32, _U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_S, _INT32, _DOUBLE = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_double)
# of draws: status, token, logprob, max_top, top_count, top_ids, top_logprobs
_RESULTS = (_INT32, _INT32, _DOUBLE, _I32, _INT32, _INT32, _DOUBLE)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cavectl_abi": (_I32, ()),
    "cavectl_isas": (_S, ()),
    "cavectl_pack": (_I32, (_S, _P, _U64, _U64, _U64, _U64, _U32, _P, _U64, _INT32, _P)),
    "cavectl_unpack": (_I32, (_U32, _I32, _P, _U64, _U64, _U64, _U64, _U64, _P, _P)),
    "cavectl_check_packed": (_I32, (_P, _U64, _P)),
    "cavectl_sample": (_I32, (_P, _I32, _P, _I64, _P, _I64, _P, *_RESULTS, _P)),
    "cavectl_open": (_P, (_P, _U64, _P, _U64, _P, _I32, _I32, _S, _P)),
    "cavectl_close": (None, (_P,)),
    "cavectl_grow": (_I32, (_P, _P, _P, _P, _I32, _P)),
    "cavectl_step": (_I32, (_P, _P, _I64, _P, _I64, _P, _I64, _I32, _INT32, _I32, *_RESULTS, _P)),
    "cavectl_keep_logits": (_I32, (_P, _I32)),
    "cavectl_logits": (_I64, (_P, _P, _I64)),
    "cavectl_resident_bytes": (_I64, (_P,)),
    "cavectl_lookup_open": (_P, ()),
    "cavectl_lookup_close": (None, (_P,)),
    "cavectl_lookup_size": (_I64, (_P,)),
    "cavectl_lookup_propose": (_I64, (_P, _P, _U64, _U64, _U64, _U64, _U64, _INT32)),
    "cavectl_op_quantise": (_I32, (_S, _P, _U64, _U64, _P, _P, _P)),
    "cavectl_op_matmul": (_I32, (_S, _P, _P, _U64, _U64, _I32, _P, _P)),
    "cavectl_op_feed": (_I32, (_S, _P, _P, _U32, _P, _U64, _U64, _P, _P)),
    "cavectl_op_rms_norm": (_I32, (_S, _P, _P, _U64, _U64, ctypes.c_float, _P, _P)),
    "cavectl_op_rotate": (_I32, (_S, _P, _P, _P, _U64, _P)),
    "cavectl_op_write_kv": (_I32, (_S, _P, _U64, _U64, _P, _P, _P)),
    "cavectl_op_attend": (_I32, (_S, _P, _P, _U64, _U64, _U64, _P, _U64, ctypes.c_float, _P, _P)),
    "cavectl_read_bandwidth": (_I32, (_U64, _I32, _I32, _DOUBLE, _P)),
}


class NativeUnavailable(CavectlError):
    """The native backend cannot be used here. The message is one line that says why."""

    code = "device_unavailable"


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """`functions` are those of cavectl.h; `isas` the instruction sets that this build has and this machine runs, best first."""

    path: Path
    functions: ctypes.CDLL
    isas: tuple[str, ...]


@functools.cache
def load() -> NativeLibrary:
    """The library, built first in a source tree. Raises NativeUnavailable."""
    return load_from(_find())


def load_from(path: Path) -> NativeLibrary:
    """The library at `path`. Raises NativeUnavailable when it cannot be loaded or is of another ABI."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the native library cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        if (function := getattr(functions, name, None)) is not None:
            function.restype, function.argtypes = result, arguments
    abi = functions.cavectl_abi() if hasattr(functions, "cavectl_abi") else "none"
    if abi != ABI:
        raise NativeUnavailable(f"the native library has ABI {abi}, this version needs {ABI}")
    return NativeLibrary(path, functions, tuple(functions.cavectl_isas().decode().split(",")))


def cache_folder() -> Path:
    """Where a source tree keeps its builds."""
    tests = os.environ.get("CAVECTL_TEST_CACHE")
    return Path(tests) if tests else platformdirs.user_cache_path("cavectl")


def _find() -> Path:
    installed = SOURCES / NAME
    if installed.exists():
        return installed
    try:
        return cached_library(cache_folder())
    except BuildError as error:
        raise NativeUnavailable(
            f"the native backend is not built: {error}", hint="install a C++ compiler, then cavectl again"
        ) from error
    except OSError as error:
        raise NativeUnavailable(f"the native backend cannot be built: {error}") from error
