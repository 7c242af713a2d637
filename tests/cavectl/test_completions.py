"""Completion files: what is checked in is what the command table gives, and the shells take it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cavectl import completions
from tests.cavectl.conftest import ROOT, Home

FOLDER = ROOT / "completions"


@pytest.mark.parametrize("name", ["cavectl.bash", "_cavectl", "cavectl.fish"])
def test_the_files_are_fresh(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == completions.files()[name], "run: python -m cavectl.completions"


def test_there_is_no_other_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(completions.files())


def complete(home: Home, typed: str) -> list[str]:
    """What bash offers after `typed`, split at colons as an interactive bash does."""
    (home.path / "bin").mkdir(exist_ok=True)
    program = home.path / "bin" / "cavectl"
    program.write_text('#!/bin/sh\n[ "$*" = "__complete models" ] && printf "smollm2:135m\\nmine:latest\\n"\n')
    program.chmod(0o755)
    script = f"""
      source {FOLDER / "cavectl.bash"}
      COMP_LINE=$1 COMP_POINT=${{#1}} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
      compopt() {{ :; }}
      _cavectl
      printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environ = home.environ | {"PATH": f"{program.parent}:{home.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script, "bash", typed], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cavectl li", ["list"]),
        ("cavectl daemon st", ["start", "stop", "status"]),
        ("cavectl --url http://127.0.0.1:1 sh", ["show"]),
        ("cavectl list --j", ["--json"]),
        ("cavectl run sm", ["smollm2:135m"]),
        ("cavectl run smollm2:1", ["135m"]),
        ("cavectl run -m m", ["mine:latest"]),
        ("cavectl run --stdin a", ["auto", "append"]),
        ("cavectl run --system s", []),
        ("cavectl rm ", ["smollm2:135m", "mine:latest"]),
        ("cavectl nonsense ", []),
    ],
)
def test_bash_completes(home: Home, typed: str, offered: list[str]) -> None:
    assert complete(home, typed) == offered


def test_bash_lists_every_command(home: Home) -> None:
    assert set(complete(home, "cavectl ")) == set(completions.first_words())


@pytest.mark.parametrize(("shell", "name"), [("zsh", "_cavectl"), ("fish", "cavectl.fish")])
def test_other_shells_can_parse_their_file(shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", FOLDER / name], check=True, capture_output=True)


def test_names_come_from_the_list_that_commands_keep(home: Home, tmp_path: Path) -> None:
    (home.data_dir / "model-names").write_text("a:b\nsmollm2:135m\n")
    assert home.run("__complete", "models").stdout == b"a:b\nsmollm2:135m\n"
    assert home.run("__complete", "something").returncode == 2
