"""What a command imports, and how long that takes: the reason why the parts are imported where they are used."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from cavectl import __version__
from tests.cavectl.conftest import ROOT, Home
from tests.cavectl.fake_daemon import FakeDaemon

HEAVY = {
    "rich",
    "prompt_toolkit",
    "httpx",
    "pydantic",
    "asyncio",
    "starlette",
    "uvicorn",
    "jinja2",
    "torch",
    "numpy",
    "tokenizers",
}
PARSER = {"typer", "click", "argparse"}
SHOW_MODULES = "import sys, cavectl.__main__ as m\ncode = m.main()\nsys.stderr.write(' '.join(sys.modules))\nsys.exit(code)"


def modules(home: Home, *arguments: str) -> set[str]:
    """Top-level packages in memory when a command ends."""
    command = [sys.executable, "-c", SHOW_MODULES, *arguments]
    done = subprocess.run(
        command, env=home.environ, cwd=ROOT, capture_output=True, timeout=60, check=True, stdin=subprocess.DEVNULL
    )
    return set(done.stderr.decode().split())


def test_the_version_is_answered_with_nothing_imported(home: Home) -> None:
    loaded = modules(home, "--version")
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | PARSER | {"msgspec", "http", "platformdirs"})
    assert home.run("--version").stdout.decode() == f"cavectl {__version__}\n"


def test_completion_needs_no_parser(home: Home) -> None:
    assert not {name.split(".")[0] for name in modules(home, "__complete", "models")} & (HEAVY | PARSER | {"http"})


def test_help_imports_no_command(home: Home) -> None:
    loaded = modules(home, "--help")
    assert not {name for name in loaded if name.startswith("cavectl.commands.")}
    assert not loaded & PARSER


@pytest.mark.parametrize("arguments", [("list",), ("run", "Why is it?"), ("ps",), ("run", "--help")])
def test_commands_import_what_they_use(home: Home, fake: FakeDaemon, arguments: tuple[str, ...]) -> None:
    assert not {name.split(".")[0] for name in modules(home, *arguments)} & HEAVY


def fastest_ms(home: Home, *command: str, tries: int = 7) -> float:
    times: list[float] = []
    for _ in range(tries):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], env=home.environ, cwd=ROOT, capture_output=True, timeout=60, check=True)
        times.append((time.perf_counter() - start) * 1000)
    return min(times)


@pytest.mark.timing
def test_wall_times(home: Home, fake: FakeDaemon) -> None:
    """In multiples of what the bare interpreter takes at this moment: 10 ms on a quiet machine of the kind in design.md."""
    bare = fastest_ms(home, "-c", "pass")
    assert fastest_ms(home, "-m", "cavectl", "--version") < 4 * bare
    assert fastest_ms(home, "-m", "cavectl", "__complete", "models") < 7 * bare
    assert fastest_ms(home, "-m", "cavectl", "list") < 16 * bare


def test_the_version_is_the_packages(home: Home) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    path = project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{__version__}"' in (ROOT / path).read_text(encoding="utf-8")
