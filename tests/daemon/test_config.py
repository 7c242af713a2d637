"""Settings: which source wins, what is refused and how it is named, and where the socket goes when paths are long."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.config import KEYS, Settings, resolve
from engine.errors import CavectlError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "CAVECTL_DATA_DIR": str(tmp_path / "data"),
        "CAVECTL_CONFIG_DIR": str(tmp_path / "config"),
        "HF_HOME": str(tmp_path / "hf"),
    }


def write(environ: dict[str, str], text: str) -> None:
    folder = Path(environ["CAVECTL_CONFIG_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text)


def test_flag_beats_environment_beats_file_beats_default(environ: dict[str, str]) -> None:
    seen = []
    seen.append(resolve({}, environ))
    write(environ, "port = 3")
    seen.append(resolve({}, environ))
    environ["CAVECTL_PORT"] = "2"
    seen.append(resolve({}, environ))
    seen.append(resolve({"port": "1"}, environ))
    seen.append(resolve({"port": None}, environ))
    assert [settings.port for settings in seen] == [11435, 3, 2, 1, 2]
    origins = [settings.origin("port") for settings in seen]
    assert origins == ["default", "config.toml", "environment CAVECTL_PORT", "flag --port", "environment CAVECTL_PORT"]


def test_settings_are_frozen_and_every_key_has_an_origin(environ: dict[str, str]) -> None:
    settings = resolve({}, environ)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]
    for name in KEYS:
        assert settings.origin(name)
    with pytest.raises(KeyError):
        settings.origin("nonsense")
    with pytest.raises(TypeError):
        settings.origins["port"] = "x"  # type: ignore[index]


def test_every_key_can_be_set_in_every_place(environ: dict[str, str], tmp_path: Path) -> None:
    samples: dict[type, Any] = {int: 1234, float: 12.5, str: "debug", tuple: ("a", "b")}
    exact: dict[str, Any] = {
        "backend": "cpu",
        "kv_dtype": "int8",
        "template_memory_bytes": 2**26,
        "prefix_cache": False,
        "speculation": False,
    }
    defaults = resolve({}, environ)
    for name in (name for name in KEYS if not isinstance(getattr(defaults, name), Path)):
        value = exact[name] if name in exact else samples[type(getattr(defaults, name))]
        as_text = ",".join(value) if isinstance(value, tuple) else "off" if value is False else str(value)
        assert getattr(resolve({name: as_text}, environ), name) == value
        assert getattr(resolve({}, environ | {f"CAVECTL_{name.upper()}": as_text}), name) == value
        write(environ, f"{name} = {json.dumps(value)}")
        assert getattr(resolve({}, environ), name) == value
        assert resolve({}, environ).origin(name) == "config.toml"


BAD = [
    ("port", "70000", "from -1 to 65535"),
    ("port", "-2", "from -1 to 65535"),
    ("port", "1.5", "whole number"),
    ("port", "eleven", "whole number"),
    ("port", True, "whole number"),
    ("max_queue", "0", "from 1 to"),
    ("header_timeout_s", "nan", "number"),
    ("header_timeout_s", "inf", "number"),
    ("keep_alive_s", "nan", "finite"),
    ("keep_alive_s", "1e999", "finite"),
    ("keep_alive_s", "soon", "number"),
    ("backend", "tpu", "one of"),
    ("kv_dtype", "float64", "one of"),
    ("prefix_cache", "maybe", "on or off"),
    ("prefix_cache", 1, "on or off"),
    ("log_level", "LOUD", "one of"),
    ("api_key", "a\nb", "one line"),
    ("api_key", 5, "one line"),
    ("allowed_hosts", 5, "list"),
    ("allowed_hosts", [["a"]], "list"),
    ("allowed_origins", ["a\nb"], "printable"),
    ("data_dir", "a\0b", "path"),
    ("data_dir", 5, "path"),
    ("data_dir", "~nobody-by-this-name/x", "home directory"),
]


@pytest.mark.parametrize(("name", "value", "problem"), BAD, ids=str)
def test_bad_value_names_the_key_and_its_origin(environ: dict[str, str], name: str, value: Any, problem: str) -> None:
    sources = [({name: value}, environ, f"flag --{name.replace('_', '-')}")]
    if isinstance(value, str) and "\0" not in value:
        sources.append(({}, environ | {f"CAVECTL_{name.upper()}": value}, f"environment CAVECTL_{name.upper()}"))
    for flags, variables, origin in sources:
        with pytest.raises(CavectlError) as caught:
            resolve(flags, variables)
        assert caught.value.code == "invalid_request"
        assert caught.value.message.startswith(f"setting {name} ({origin}): ") and problem in caught.value.message
        assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "prot (config.toml): is not a setting"),
        ("port = ", "config.toml"),
        ("port = 1\nport = 2", "config.toml"),
        ("config_dir = '/x'", "config_dir (config.toml)"),
        ("[table]\nport = 1", "table (config.toml)"),
        ("port = [1]", "port (config.toml)"),
        ("\x00", "config.toml"),
    ],
)
def test_bad_file_is_an_error(environ: dict[str, str], text: str, problem: str) -> None:
    write(environ, text)
    with pytest.raises(CavectlError, match=problem.replace("(", r"\(").replace(")", r"\)")) as caught:
        resolve({}, environ)
    if "prot" in text:
        assert caught.value.hint == "did you mean port?"


def test_file_that_is_not_text_or_not_readable(environ: dict[str, str]) -> None:
    write(environ, "")
    path = Path(environ["CAVECTL_CONFIG_DIR"]) / "config.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CavectlError, match=r"config\.toml"):
        resolve({}, environ)
    path.unlink()
    path.mkdir()
    with pytest.raises(CavectlError, match=r"config\.toml"):
        resolve({}, environ)


def test_unknown_flag_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(CavectlError, match="sokcet"):
        resolve({"sokcet": "x"}, environ)


def test_no_port_and_lists(environ: dict[str, str]) -> None:
    assert resolve({"port": "off"}, environ).port == -1
    assert resolve({"port": -1}, environ).port == -1
    assert resolve({"allowed_hosts": " a.lan, b.lan ,"}, environ).allowed_hosts == ("a.lan", "b.lan")
    assert resolve({}, environ | {"CAVECTL_PORT": ""}).port == 11435, "an empty variable is one that is not set"


def test_secrets_are_not_in_the_representation(environ: dict[str, str]) -> None:
    settings = resolve({}, environ | {"CAVECTL_API_KEY": "hush-key", "CAVECTL_HUB_TOKEN": "hf_hush"})
    assert (settings.api_key, settings.hub_token) == ("hush-key", "hf_hush")
    assert "hush" not in repr(settings)


def test_hub_variables(environ: dict[str, str]) -> None:
    assert resolve({}, environ).hub_endpoint == "https://huggingface.co"
    settings = resolve({}, environ | {"HF_ENDPOINT": "http://localhost:1"})
    assert (settings.hub_endpoint, settings.origin("hub_endpoint")) == ("http://localhost:1", "environment HF_ENDPOINT")
    assert resolve({}, environ | {"HF_ENDPOINT": "http://a", "CAVECTL_HUB_ENDPOINT": "http://b"}).hub_endpoint == "http://b"
    assert resolve({}, environ | {"HF_TOKEN": "hf_x"}).hub_token == "", "huggingface_hub is asked for its own, with the first pull"


def test_runtime_dir_follows_the_session_or_the_data(environ: dict[str, str], tmp_path: Path) -> None:
    assert resolve({}, environ).socket == tmp_path / "data" / "run" / "daemon.sock"
    assert resolve({}, environ | {"XDG_RUNTIME_DIR": str(tmp_path)}).socket == tmp_path / "cavectl" / "daemon.sock"
    for missing in ("", "relative", str(tmp_path / "nowhere")):
        assert resolve({}, environ | {"XDG_RUNTIME_DIR": missing}).runtime_dir == tmp_path / "data" / "run"


def test_long_path_falls_back_to_a_short_private_one(environ: dict[str, str], tmp_path: Path) -> None:
    edge = 107 - len("/daemon.sock")
    fits = "/" + "d" * (edge - 1)
    assert str(resolve({"runtime_dir": fits}, environ).socket) == fits + "/daemon.sock"
    long, other = resolve({"runtime_dir": fits + "d"}, environ), resolve({"runtime_dir": fits + "e"}, environ)
    for settings in (long, other):
        assert len(os.fsencode(settings.socket)) <= 107
        assert settings.socket.parent.name.startswith(f"cavectl-{os.getuid()}-")
        assert "too long" in settings.origin("socket")
    assert long.socket != other.socket
    assert long.socket == resolve({"runtime_dir": fits + "d"}, environ | {"TMPDIR": str(tmp_path)}).socket, (
        "all must find the same one"
    )
    with pytest.raises(CavectlError, match=r"socket.*107 bytes"):
        resolve({"socket": "/" + "s" * 107}, environ)
    assert resolve({"socket": "/" + "s" * 106}, environ).socket == Path("/" + "s" * 106)
    with pytest.raises(CavectlError, match=r"socket.*107 bytes"):
        resolve({"socket": "/" + "é" * 54}, environ)


def test_no_home_directory() -> None:
    """Without HOME and without an entry in the user database there is nowhere to put anything, and that is said."""
    code = "import sys; sys.modules['pwd'] = None\nfrom daemon.config import resolve\nresolve({}, {})"
    env = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith(("XDG_", "CAVECTL_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=20)
    assert "CavectlError" in done.stderr or "InvalidRequest" in done.stderr
    assert "setting config_dir (default): there is no home directory" in done.stderr


def test_import_is_light() -> None:
    """The command line reads the settings first: nothing heavy may come with them."""
    code = "import sys, daemon.config; daemon.config.resolve({}); print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    heavy = {
        "asyncio",
        "msgspec",
        "uvicorn",
        "starlette",
        "torch",
        "http.client",
        "logging",
        "json",
        "ssl",
        "socket",
        "tempfile",
        "hashlib",
    }
    assert loaded & heavy <= ({"tempfile", "hashlib"} & loaded)
    assert "platformdirs" in loaded


def test_settings_can_be_replaced_in_tests(environ: dict[str, str]) -> None:
    settings = dataclasses.replace(resolve({}, environ), port=5)
    assert isinstance(settings, Settings) and settings.port == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 1 << 20), ("2GiB", 2 << 30), ("2g", 2 << 30), ("500 MB", 500_000_000), ("1.5k", 1536), ("1TB", 10**12)],
)
def test_sizes_may_have_units(environ: dict[str, str], text: str, size: int) -> None:
    assert resolve({"kv_memory_bytes": text}, environ).kv_memory_bytes == size


@pytest.mark.parametrize("text", ["", " ", "2 gigs", "-1GiB", "1.5", "ib", "2i", "nan", "1e9", "0x10", "9999TiB"])
def test_what_is_no_size_is_refused_by_name(environ: dict[str, str], text: str) -> None:
    with pytest.raises(CavectlError, match="kv_memory_bytes"):
        resolve({"kv_memory_bytes": text}, environ)
