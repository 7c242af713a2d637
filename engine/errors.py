"""The one family of errors that a user can cause or must be told about.

Owned here: the stable codes, and the mapping to and from the wire. Not here: HTTP statuses (daemon/api/errors.py) and exit codes
(cavectl/exit_codes.py), both keyed by `code`. A message is one line, without paths of ours, addresses or tracebacks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorCode = Literal[
    "invalid_request",  # malformed or contradictory input
    "unknown_field",  # a request field nobody reads
    "unsupported",  # understood, not offered here
    "invalid_name",  # not a model name
    "model_not_found",
    "model_exists",
    "context_length_exceeded",
    "out_of_memory",  # does not fit: model, cache or request
    "unsupported_model",  # architecture, RoPE type, quantisation, file type
    "unsupported_tokenizer",
    "corrupt_file",  # a file breaks its own format
    "hash_mismatch",
    "no_space",
    "no_process",  # a helper process cannot be started: the machine is out of processes, memory or files
    "network_error",
    "hub_unauthorized",
    "hub_not_found",
    "hub_rate_limited",
    "queue_full",
    "worker_died",
    "worker_timeout",
    "engine_error",  # a step failed for this request
    "template_error",
    "template_timeout",
    "unauthorized",
    "forbidden",
    "too_large",
    "timeout",
    "cancelled",
    "request_not_found",  # no request with that id is in work
    "starting",  # the daemon answers, its routes are not ready yet
    "shutting_down",
    "too_many_connections",
    "device_unavailable",
    "daemon_unreachable",
    "daemon_running",
    "store_error",
    "internal_error",
]


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data: what crosses the worker's socketpair, and what a client is shown."""

    code: ErrorCode
    message: str
    hint: str = ""


class CavectlError(Exception):
    """Base of every error meant for a person. `code` is stable, `hint` says what to do next ("" when nothing is known)."""

    code: ErrorCode = "internal_error"

    def __init__(self, message: str, *, hint: str = "", code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.hint)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> CavectlError:
        return CavectlError(info.message, hint=info.hint, code=info.code)


class InvalidRequest(CavectlError):
    code = "invalid_request"


class ModelNotFound(CavectlError):
    code = "model_not_found"


class UnsupportedModel(CavectlError):
    code = "unsupported_model"


class CorruptFile(CavectlError):
    code = "corrupt_file"


class OutOfMemory(CavectlError):
    code = "out_of_memory"


class ContextLengthExceeded(CavectlError):
    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, context_tokens: int, at_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens and the context holds {context_tokens}",
            hint="shorten the prompt, or ask for a larger context with --ctx (request field: ctx)",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
