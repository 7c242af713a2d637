"""What the process says when it ends: one number per kind of failure.

The table covers every stable error code, so that an error reads the same on the screen and in `$?`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from engine.errors import ErrorCode


class ExitCode(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    DOES_NOT_FIT = 5
    CONTEXT_EXCEEDED = 6
    NETWORK = 7
    DEVICE = 8
    INTERRUPTED = 130  # 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


EXIT_CODES: Mapping[ErrorCode, ExitCode] = MappingProxyType(
    {
        "invalid_request": ExitCode.USAGE,
        "unknown_field": ExitCode.USAGE,
        "unsupported": ExitCode.ERROR,
        "invalid_name": ExitCode.USAGE,
        "model_not_found": ExitCode.NOT_FOUND,
        "model_exists": ExitCode.ERROR,
        "context_length_exceeded": ExitCode.CONTEXT_EXCEEDED,
        "out_of_memory": ExitCode.DOES_NOT_FIT,
        "unsupported_model": ExitCode.ERROR,
        "unsupported_tokenizer": ExitCode.ERROR,
        "corrupt_file": ExitCode.ERROR,
        "hash_mismatch": ExitCode.NETWORK,
        "no_space": ExitCode.ERROR,
        "no_process": ExitCode.ERROR,
        "network_error": ExitCode.NETWORK,
        "hub_unauthorized": ExitCode.NETWORK,
        "hub_not_found": ExitCode.NOT_FOUND,
        "hub_rate_limited": ExitCode.NETWORK,
        "queue_full": ExitCode.ERROR,
        "worker_died": ExitCode.ERROR,
        "worker_timeout": ExitCode.ERROR,
        "engine_error": ExitCode.ERROR,
        "template_error": ExitCode.ERROR,
        "template_timeout": ExitCode.ERROR,
        "unauthorized": ExitCode.ERROR,
        "forbidden": ExitCode.ERROR,
        "too_large": ExitCode.ERROR,
        "timeout": ExitCode.ERROR,
        "cancelled": ExitCode.ERROR,
        "request_not_found": ExitCode.NOT_FOUND,
        "starting": ExitCode.UNREACHABLE,
        "too_many_connections": ExitCode.ERROR,
        "shutting_down": ExitCode.UNREACHABLE,
        "device_unavailable": ExitCode.DEVICE,
        "daemon_unreachable": ExitCode.UNREACHABLE,
        "daemon_running": ExitCode.ERROR,
        "store_error": ExitCode.ERROR,
        "internal_error": ExitCode.ERROR,
    }
)


def exit_code(code: str) -> ExitCode:
    """The exit code of an error; ERROR for a code that only a newer daemon knows."""
    return EXIT_CODES.get(code, ExitCode.ERROR)  # type: ignore[call-overload]
