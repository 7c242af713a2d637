"""install.sh with stand-ins for Python, pip and the program: what is installed, in which order, and what is remembered.

The stand-in writes down every call. What reads pyproject.toml runs for real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = "bash cat chmod cut dirname find grep head id ln ls mkdir mv printf readlink rm rmdir sed sha256sum sh sort tac uname xargs"
PYTHON = """\
#!/bin/sh
state={state}
case "$*" in
  *"-m venv "*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
  *"-m pip install"*)
    for word; do :; done
    if [ -f "$word" ]; then what=$(tr '\\n' ' ' <"$word"); else what=$word; fi
    echo "pip$(case "$*" in *--no-deps*) echo ' --no-deps' ;; esac): $what" >>"$state/calls"
    [ ! -e "$state/no-$(basename "$word")" ] ;;
  *"-m cavectl "*)
    while [ "$1" != cavectl ]; do shift; done
    echo "$*" >>"$state/calls"
    case $2 in
      show) [ -e "$state/pulled" ] ;;
      pull) touch "$state/pulled" ;;
      run) echo an answer; exit "$(cat "$state/run-code" 2>/dev/null || echo 0)" ;;
    esac ;;
  "-I -") cat >/dev/null; [ ! -e "$state/no-native" ] || {{ echo no compiler here; exit 1; }} ;;
  "-I - "*) exec {python} "$@" ;;
esac
"""


@dataclass
class World:
    folder: Path
    path: Path = field(init=False)
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path, self.home = self.folder / "bin", self.folder / "home"
        self.path.mkdir()
        self.home.mkdir()
        for name in (*TOOLS.split(), "basename", "cp", "touch", "tr"):
            (self.path / name).symlink_to(shutil.which(name) or name)
        self.program("python3", PYTHON.format(state=self.folder, python=sys.executable))

    def program(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def gpu(self) -> None:
        self.program("nvidia-smi", '#!/bin/sh\necho "Some GPU, 575.1"\n')

    def flag(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the script; `calls` are of this run alone."""
        (self.folder / "calls").write_text("")
        return subprocess.run(
            ["bash", str(ROOT / "install.sh"), *arguments],
            env={"PATH": str(self.path), "HOME": str(self.home), "LANG": os.environ.get("LANG", "C")},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> list[str]:
        """What was done, in order: rest, package, torch, and the program's commands by their first word."""
        names = []
        for line in (self.folder / "calls").read_text().splitlines():
            if line.startswith("cavectl "):
                names.append(line.split()[1])
            elif line == f"pip --no-deps: {ROOT}":
                names.append("package")
            else:
                names.append("torch" if line.startswith("pip: torch") else "rest")
        return names


FIRST = ["rest", "package", "show", "pull"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_without_a_gpu_all_but_torch_is_installed(world: World) -> None:
    result = world.install("run", "why?")
    assert result.returncode == 0, result.stderr
    assert world.calls == [*FIRST, "run"] and result.stdout == "an answer\n"
    assert world.install().returncode == 0 and world.calls == ["show"]


def test_the_two_parts_are_what_pyproject_says(world: World) -> None:
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert world.install("--with-torch").returncode == 0
    lines = [line.split(": ", 1)[1] for line in (world.folder / "calls").read_text().splitlines() if line.startswith("pip: ")]
    rest, torch = lines
    assert torch.split() == " ".join(w for w in wanted if w.startswith(("torch", "triton"))).split()
    assert "torch>=" in torch and "triton>=" in torch
    assert rest.split() == " ".join(w for w in wanted if not w.startswith(("torch", "triton"))).split()


@pytest.mark.parametrize("how", ["a GPU", "the option"])
def test_torch_comes_after_the_answer(world: World, how: str) -> None:
    if how == "a GPU":
        world.gpu()
    result = world.install(*(["--with-torch"] if how == "the option" else []), "run", "why?")
    assert result.returncode == 0, result.stderr
    assert world.calls == [*FIRST, "run", "torch"] and result.stdout == "an answer\n"
    assert world.install("run", "why?").returncode == 0 and world.calls == ["show", "run"]


def test_torch_is_added_to_what_is_installed_without_making_it_again(world: World) -> None:
    world.install()
    result = world.install("--with-torch")
    assert result.returncode == 0 and world.calls == ["show", "torch"]
    assert "making the environment" not in result.stderr


def test_no_torch_is_for_good(world: World) -> None:
    world.gpu()
    for arguments, calls in ((["--no-torch"], FIRST), ([], ["show"]), (["--with-torch"], ["show", "torch"]), ([], ["show"])):
        result = world.install(*arguments)
        assert result.returncode == 0 and world.calls == calls, result.stderr


def test_torch_stays_when_the_environment_is_made_anew(world: World) -> None:
    world.install("--with-torch")
    (world.home / ".local/share/cavectl/venv/.fingerprint").write_text("of older sources")
    assert world.install().returncode == 0
    assert world.calls == ["rest", "package", "daemon", "show", "torch"]


def test_without_a_compiler_torch_comes_first_and_one_line_says_so(world: World) -> None:
    world.flag("no-native")
    result = world.install("run", "why?")
    assert result.returncode == 0, result.stderr
    assert world.calls == ["rest", "package", "torch", "show", "pull", "run"]
    assert "note: no compiler here; torch is installed to run models in its place, slowly" in result.stderr.splitlines()


def test_without_a_compiler_and_without_torch_nothing_can_run(world: World) -> None:
    world.flag("no-native")
    result = world.install("--no-torch", "--no-model")
    assert result.returncode == 0 and world.calls == ["rest", "package"]
    assert "no model can run (./install.sh --with-torch brings it)" in result.stderr


@pytest.mark.parametrize(("code", "after"), [("1", ["torch"]), ("130", [])])
def test_the_answers_code_is_the_scripts(world: World, code: str, after: list[str]) -> None:
    world.flag("run-code", code)
    result = world.install("--with-torch", "run", "why?")
    assert result.returncode == int(code) and world.calls == [*FIRST, "run", *after]


def test_a_second_stage_that_fails_is_tried_again(world: World) -> None:
    world.flag("no-requirements.txt")
    assert world.install().returncode == 7 and world.calls == ["rest"]
    (world.folder / "no-requirements.txt").unlink()
    world.install()
    world.flag("no-requirements.txt")
    result = world.install("--with-torch")
    assert result.returncode == 7 and "torch could not be installed" in result.stderr
    (world.folder / "no-requirements.txt").unlink()
    assert world.install("--with-torch").returncode == 0 and world.calls == ["show", "torch"]


def test_uninstall_takes_away_both_stages(world: World) -> None:
    world.install("--with-torch")
    built = world.home / ".cache/cavectl/native-0123"
    built.mkdir(parents=True)
    assert world.install("--uninstall").returncode == 0
    assert not [p for p in world.home.rglob("*") if p.name != ".cache"]
