"""Settings: flag > CAVECTL_* environment > config.toml > default, resolved once into a frozen object.

Owns every name, default, bound and unit of the configuration, and where each value came from. Imports the standard library and
platformdirs only, because the command line reads it before anything else; creates nothing on disk. A value that cannot be used is
an error that names the key and its origin, never a silent default.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket: sun_path holds 108 bytes on Linux with the final NUL (104 on macOS, see `_socket_limit`)."""

NO_PORT = -1
DEFAULT_HUB = "https://huggingface.co"
LOG_LEVELS = ("debug", "info", "warning", "error")
BACKENDS = ("auto", "reference", "cpu", "cuda")
KV_DTYPES = ("auto", "float32", "float16", "int8")


def _key(
    default: Any, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = (), secret: bool = False
) -> Any:
    """A field of Settings with its default and bounds."""
    return field(default=default, repr=not secret, metadata={"low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The configuration of one process. Seconds, bytes and tokens are in the names. `origin` says where a value came from."""

    data_dir: Path
    config_dir: Path
    runtime_dir: Path
    socket: Path
    host: str = _key("127.0.0.1")
    port: int = _key(11435, low=NO_PORT, high=65535)  # 0: the kernel chooses; -1 ("off"): no TCP
    api_key: str = _key("", secret=True)
    allowed_hosts: tuple[str, ...] = _key(())
    allowed_origins: tuple[str, ...] = _key(())
    allowed_uids: tuple[str, ...] = _key(())  # users, besides this one and root, who may use the Unix socket ("*": any)
    keep_alive_s: float = _key(300.0)  # negative: for ever
    context_tokens: int = _key(0, low=0, high=2**24)  # 0: the model's own, at most 8192
    threads: int = _key(0, low=0, high=4096)  # 0: one per physical core
    backend: str = _key("auto", choices=BACKENDS)
    kv_dtype: str = _key("auto", choices=KV_DTYPES)  # what keys and values are kept in; auto: the backend's own
    kv_memory_bytes: int = _key(0, low=0, high=2**50)  # 0: what the machine can spare
    max_queue: int = _key(128, low=1, high=1_000_000)
    max_connections: int = _key(1024, low=1, high=65536)
    max_connections_per_peer: int = _key(256, low=1, high=65536)
    max_request_line_bytes: int = _key(8192, low=64, high=2**20)
    max_header_bytes: int = _key(32768, low=256, high=2**20)
    max_headers: int = _key(100, low=1, high=10_000)
    max_body_bytes: int = _key(32 * 2**20, low=1024, high=2**32)
    header_timeout_s: float = _key(10.0, low=0.05, high=86400)
    body_idle_timeout_s: float = _key(30.0, low=0.05, high=86400)
    body_timeout_s: float = _key(300.0, low=0.05, high=86400)
    write_stall_timeout_s: float = _key(30.0, low=0.05, high=86400)
    idle_timeout_s: float = _key(75.0, low=0.05, high=86400)
    drain_timeout_s: float = _key(30.0, low=0.0, high=86400)
    startup_timeout_s: float = _key(60.0, low=0.0, high=3600)  # how long a request waits for the daemon to be ready
    ping_interval_s: float = _key(15.0, low=0.05, high=3600)
    load_timeout_s: float = _key(300.0, low=0.1, high=86400)
    watchdog_s: float = _key(60.0, low=0.1, high=86400)  # a worker with requests that is silent for so long hangs, and is killed
    target_itl_ms: float = _key(50.0, low=1.0, high=60_000)  # time between two tokens of a stream that prompt chunks are cut for
    priority_aging_s: float = _key(30.0, low=0.1, high=86400)  # a request that waited so long counts one priority class up
    speculation: bool = _key(True)  # whether tokens are drafted, and several checked in one step, where that pays
    prefix_cache: bool = _key(True)  # whether prompts share what they begin with alike
    chat_retention_s: float = _key(1800.0, low=0.0, high=30 * 86400)  # how long an unused prefix of a chat stays cached ...
    rest_retention_s: float = _key(300.0, low=0.0, high=30 * 86400)  # ... and any other; sooner gone where space is needed
    worker_command: str = _key("")  # "": this Python with -m engine.worker
    pre_tokenizer: str = _key("")  # read in place of a pre-tokenizer that a GGUF does not name or that is not known
    template_timeout_s: float = _key(1.0, low=0.01, high=600)
    template_memory_bytes: int = _key(256 * 2**20, low=32 * 2**20, high=2**40)
    hub_endpoint: str = _key(DEFAULT_HUB)
    hub_token: str = _key("", secret=True)  # "": that of the user's hub login, if any (HF_TOKEN among them)
    connect_timeout_s: float = _key(3.0, low=0.05, high=600)
    read_timeout_s: float = _key(30.0, low=0.05, high=3600)
    index_url: str = _key("")  # "": pip's own configuration
    log_level: str = _key("info", choices=LOG_LEVELS)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Where the value of `name` came from: "flag --x", "environment CAVECTL_X", "config.toml", or "default"."""
        if name not in KEYS:
            raise KeyError(name)
        return self.origins.get(name, "default")

    @property
    def daemon_file(self) -> Path:
        """The file in which a running daemon says its pid, socket and TCP port."""
        return self.runtime_dir / "daemon.json"


KEYS = tuple(f.name for f in fields(Settings) if f.name != "origins")


def resolve(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this process. A flag that is None was not given. Raises CavectlError (invalid_request)."""
    sources = _Sources(flags or {}, environ)
    values: dict[str, Any] = {"config_dir": sources.directory("config_dir", _user_dirs("config"))}
    sources.read_file(values["config_dir"] / "config.toml")
    values["data_dir"] = sources.directory("data_dir", _user_dirs("data"))
    values["runtime_dir"] = sources.directory("runtime_dir", lambda: _default_runtime_dir(environ, values["data_dir"]))
    values["socket"] = _socket_path(sources, values["runtime_dir"])
    for key in fields(Settings):
        if key.name in KEYS and key.name not in values:
            found = sources.find(key.name)
            values[key.name] = key.default if found is None else _checked(key.name, key.default, key.metadata, *found)
    return Settings(**values, origins=MappingProxyType(sources.origins))


class _Sources:
    """The places a value may come from, asked in their order; remembers which one answered."""

    aliases: Mapping[str, str] = MappingProxyType({"hub_endpoint": "HF_ENDPOINT"})

    def __init__(self, flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        for name in flags:
            _known(name, _flag(name))
        self.flags, self.environ = flags, environ
        self.file: Mapping[str, Any] = {}
        self.file_name = "config.toml"
        self.origins: dict[str, str] = {}

    def read_file(self, path: Path) -> None:
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _bad("config.toml", self.file_name, error.strerror or "cannot be read") from error
        import tomllib

        try:
            self.file = tomllib.loads(text.decode())
        except ValueError as error:
            raise _bad("config.toml", self.file_name, " ".join(str(error).split())) from error
        for name in self.file:
            _known(name, self.file_name)
            if name == "config_dir":
                raise _bad(name, self.file_name, "cannot be set in the file that it locates")

    def find(self, name: str) -> tuple[Any, str] | None:
        """The first value given for `name`, and its origin."""
        variables = [f"CAVECTL_{name.upper()}", self.aliases.get(name, "")]
        candidates = [
            (self.flags.get(name), _flag(name)),
            *((self.environ.get(variable) or None, f"environment {variable}") for variable in variables if variable),
            (self.file.get(name), self.file_name),
        ]
        for value, origin in candidates:
            if value is not None:
                self.origins[name] = origin
                return value, origin
        return None

    def directory(self, name: str, default: Callable[[], Path]) -> Path:
        found = self.find(name)
        if found is None:
            path = default()
            if not path.is_absolute():
                raise _bad(name, "default", "there is no home directory to put it in", hint=f"set CAVECTL_{name.upper()}")
            return path
        return _path(name, *found)


def _flag(name: str) -> str:
    """A flag takes sizes with units, so that its name has none."""
    return f"flag --{name.removesuffix('_bytes').replace('_', '-')}"


def _known(name: str, origin: str) -> None:
    if name not in KEYS:
        import difflib

        close = difflib.get_close_matches(name, KEYS, 1)
        raise _bad(name, origin, "is not a setting", hint=f"did you mean {close[0]}?" if close else "")


def _checked(name: str, default: Any, bounds: Mapping[str, Any], value: Any, origin: str) -> Any:
    """`value` as the type of `default`, within bounds."""
    if isinstance(default, bool):
        return _switch(name, value, origin)
    if isinstance(default, tuple):
        return _items(name, value, origin)
    if isinstance(default, str):
        return _text(name, bounds["choices"], value, origin)
    if name == "port" and value == "off":
        return NO_PORT
    return _number(name, type(default), bounds, value, origin)


def _number(name: str, kind: type[int] | type[float], bounds: Mapping[str, Any], value: Any, origin: str) -> int | float:
    what = "a whole number" if kind is int else "a number"
    if name.endswith("_bytes"):
        what = "a size (2GiB, 500MB, or bytes)"
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        number = _size(value) if name.endswith("_bytes") and isinstance(value, str) else kind(value)
    except (ValueError, TypeError, OverflowError):
        raise _bad(name, origin, f"must be {what}, not {value!r}") from None
    low, high = bounds["low"], bounds["high"]
    beyond = (low is not None and number < low) or (high is not None and number > high)
    if beyond or not math.isfinite(number):
        between = f" from {low:g} to {high:g}" if low is not None else ", finite"
        raise _bad(name, origin, f"must be {what}{between}, not {value}")
    return number


def _switch(name: str, value: Any, origin: str) -> bool:
    """TOML's true and false, or the words on and off."""
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise _bad(name, origin, f"must be on or off, not {value!r}")
    return value == "on"


def _size(text: str) -> int:
    """Bytes: a plain number, or one with a unit (2GiB, 500 MB, 1.5g). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?b?)", text.strip().lower())
    if match is None or (match[3].startswith("i") and not match[2]) or (not match[2] and "." in match[1]):
        raise ValueError
    base = 1000 if match[3] == "b" else 1024
    return int(float(match[1]) * base ** ("kmgt".index(match[2]) + 1)) if match[2] else int(match[1])


def _text(name: str, choices: tuple[str, ...], value: Any, origin: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _bad(name, origin, "must be one line of text")
    if choices and value not in choices:
        raise _bad(name, origin, f"must be one of {', '.join(choices)}, not {value!r}")
    return value


def _items(name: str, value: Any, origin: str) -> tuple[str, ...]:
    """A list of words: a TOML array, or one string with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str | int) for item in items):
        raise _bad(name, origin, "must be a list of words")
    words = tuple(word for word in (str(item).strip() for item in items) if word)
    if not all(word.isprintable() for word in words):
        raise _bad(name, origin, "must be a list of printable words")
    return words


def _path(name: str, value: Any, origin: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise _bad(name, origin, "must be a path")
    expanded = os.path.expanduser(os.fspath(value))
    if expanded.startswith("~"):
        raise _bad(name, origin, "names a home directory that does not exist")
    return Path(os.path.abspath(expanded))


def _user_dirs(kind: str) -> Callable[[], Path]:
    def find() -> Path:
        import platformdirs

        place = platformdirs.user_config_path if kind == "config" else platformdirs.user_data_path
        try:
            return place("cavectl", appauthor=False)
        except RuntimeError:  # no home directory
            return Path()

    return find


def _default_runtime_dir(environ: Mapping[str, str], data_dir: Path) -> Path:
    base = environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "cavectl" if os.path.isabs(base) and os.path.isdir(base) else data_dir / "run"


def _socket_path(sources: _Sources, runtime_dir: Path) -> Path:
    """The Unix socket: in the runtime folder, or, where that path is too long for the kernel, in a short private folder."""
    found = sources.find("socket")
    limit = _socket_limit()
    if found is not None:
        path = _path("socket", *found)
        if len(os.fsencode(path)) > limit:
            raise _bad("socket", found[1], f"is longer than the {limit} bytes that a Unix socket may have")
        return path
    path = runtime_dir / "daemon.sock"
    if len(os.fsencode(path)) <= limit:
        return path
    sources.origins["socket"] = "default (the path in runtime_dir is too long for a socket)"
    import hashlib

    mark = hashlib.sha256(os.fsencode(runtime_dir)).hexdigest()[:12]
    return _short_base() / f"cavectl-{os.getuid()}-{mark}" / "daemon.sock"


def _short_base() -> Path:
    """A folder with a short name that every process of this user finds alike, whatever TMPDIR says."""
    return Path("/tmp") if os.path.isdir("/tmp") else Path("/var/tmp")  # noqa: S108


def _socket_limit() -> int:
    return SOCKET_PATH_BYTES if sys.platform == "linux" else 103


def _bad(name: str, origin: str, problem: str, *, hint: str = "") -> Exception:
    from engine.errors import InvalidRequest

    return InvalidRequest(f"setting {name} ({origin}): {problem}", hint=hint)
