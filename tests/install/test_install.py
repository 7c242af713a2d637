"""install.sh: what it refuses, what a cut download does, what uninstalling leaves. The real installation runs with --full."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "install.sh"


def run(script: Path, home: Path, *arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_")) or k in ("PATH", "LANG")}
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=keep | {"HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def installed(home: Path) -> Path:
    """A home as an installation leaves it, with a stand-in for the environment (no libraries) and a model of the user's own."""
    data = home / ".local/share/cavectl"
    binary = data / "venv/bin/cavectl"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\necho "$@" >>{home}/calls\n')
    binary.chmod(0o755)
    (home / ".local/bin").mkdir()
    (home / ".local/bin/cavectl").symlink_to(binary)
    (data / "models/mine").mkdir(parents=True)
    (data / "models/mine/file").write_text("kept")
    (data / "install-receipt").write_text(f"dir {home}/.local/bin\nlauncher {home}/.local/bin/cavectl\nmodel smollm2:135m\n")
    return home


def test_a_cut_download_runs_nothing(home: Path, tmp_path: Path) -> None:
    whole = SCRIPT.read_bytes()
    cuts = sorted({*range(0, len(whole) - 2, 97), *range(len(whole) - 24, len(whole) - 2)})
    part = tmp_path / "install.sh"
    for cut in cuts:
        part.write_bytes(whole[:cut])
        run(part, home)
        assert not files(home), f"the first {cut} bytes made something"


def test_unknown_options_are_refused(home: Path) -> None:
    result = run(SCRIPT, home, "--frobnicate")
    assert result.returncode == 2
    assert "unknown option --frobnicate" in result.stderr
    assert not result.stdout
    assert not files(home)


def test_an_old_python_is_named_as_the_reason(home: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    for name in ("bash", "uname", "id", "dirname", "sed"):
        (fake / name).symlink_to(shutil.which(name) or name)
    result = run(SCRIPT, home, PATH=str(fake))
    assert result.returncode == 1
    assert "no Python 3.11 or newer" in result.stderr
    assert "hint:" in result.stderr
    assert not files(home)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('echo "Some GPU, 575.1"', "NVIDIA GPU: Some GPU, 575.1 (driver left as it is)"),
        ("echo no driver; exit 9", "NVIDIA GPU: none found, running on the CPU"),
        (None, "NVIDIA GPU: none found, running on the CPU"),
    ],
    ids=["one", "broken driver", "no program"],
)
def test_a_gpu_is_named_and_only_asked(home: Path, tmp_path: Path, program: str | None, said: str) -> None:
    """The stand-in for Python makes no environment, so the installation ends right after."""
    fake, calls = tmp_path / "bin", tmp_path / "calls"
    fake.mkdir()
    programs = {"python3": '[ "$1" = -m ] && exit 1; exit 0'}
    if program is not None:
        programs["nvidia-smi"] = f'echo "$@" >>{calls}; {program}'
    for name, script in programs.items():
        (fake / name).write_text(f"#!/bin/sh\n{script}\n")
        (fake / name).chmod(0o755)
    for name in (
        "bash",
        "cat",
        "cut",
        "dirname",
        "find",
        "grep",
        "head",
        "id",
        "mkdir",
        "rm",
        "sha256sum",
        "sh",
        "sort",
        "uname",
        "xargs",
    ):
        (fake / name).symlink_to(shutil.which(name) or name)
    result = run(SCRIPT, home, PATH=str(fake))
    assert result.returncode == 1 and "the virtual environment could not be made" in result.stderr
    assert said in result.stderr.splitlines() and result.stdout == ""
    assert program is None or calls.read_text() == "--query-gpu=name,driver_version --format=csv,noheader\n"


def test_uninstall_removes_what_was_made_and_keeps_the_rest(installed: Path) -> None:
    (installed / ".local/bin/other").write_text("not ours")
    result = run(SCRIPT, installed, "--uninstall")
    assert result.returncode == 0, result.stderr
    left = files(installed)
    assert ".local/bin/cavectl" not in left
    assert ".local/share/cavectl/venv" not in left
    assert ".local/share/cavectl/install-receipt" not in left
    assert (installed / ".local/bin/other").read_text() == "not ours"
    assert (installed / ".local/share/cavectl/models/mine/file").read_text() == "kept"
    assert "rm smollm2:135m" in (installed / "calls").read_text()
    assert run(SCRIPT, installed, "--uninstall").returncode == 0


def test_uninstall_leaves_nothing_when_nothing_was_added(installed: Path) -> None:
    data = installed / ".local/share/cavectl"
    shutil.rmtree(data / "models")
    (data / "logs").mkdir()
    (data / "logs/daemon.log").write_text("a line")
    (data / "model-names").write_text("smollm2:135m")
    folders = "".join(f"dir {installed}/{name}\n" for name in (".local", ".local/share", ".local/bin"))
    (data / "install-receipt").write_text(f"{folders}launcher {installed}/.local/bin/cavectl\n")
    assert run(SCRIPT, installed, "--uninstall").returncode == 0
    assert files(installed) == {"calls"}


def test_uninstall_leaves_a_launcher_that_is_not_ours(installed: Path) -> None:
    launcher = installed / ".local/bin/cavectl"
    launcher.unlink()
    launcher.write_text("somebody else's")
    assert run(SCRIPT, installed, "--uninstall").returncode == 0
    assert launcher.read_text() == "somebody else's"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_install_run_and_uninstall_for_real(tmp_path: Path) -> None:
    """In a folder that no shebang can hold, beside modules on PYTHONPATH that would break everything if they were imported."""
    home, trap = tmp_path / "h o'me é", tmp_path / "trap"
    home.mkdir()
    trap.mkdir()
    for name in ("daemon.py", "json.py", "engine.py"):
        (trap / name).write_text("raise SystemExit('imported from PYTHONPATH')")
    poisoned = {"PYTHONPATH": str(trap), "CAVECTL_PORT": "0"}
    question = ("run", "--temp", "0", "--max-tokens", "12", "Why is the sky blue?")
    first = run(SCRIPT, home, *question, timeout=1400, **poisoned)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 4
    assert (home / ".local/bin/cavectl").is_symlink()
    second = run(SCRIPT, home, *question, timeout=120, **poisoned)
    assert second.stdout == first.stdout
    assert "installing" not in second.stderr
    assert run(SCRIPT, home, "--uninstall", **poisoned).returncode == 0
    # pip keeps .cache, and asks rustc for its version, whose launcher makes .rustup
    assert not {f for f in files(home) if not f.startswith((".cache", ".rustup"))}, "something was left behind"
