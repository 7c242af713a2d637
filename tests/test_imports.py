"""The rules of the folders: what stands at the top, who may import whom. A rule broken here is a seam lost."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DAEMON_MAY_IMPORT_OF_ENGINE = {"engine.types", "engine.config", "engine.errors"}
BANNED_CALLS = {"eval", "exec"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal", "yaml"}


TOP_LEVEL = {"cavectl", "completions", "daemon", "engine", "tests"}
TOP_LEVEL |= {"LICENSE", "README.md", "constraints.txt", "install.sh", "pyproject.toml"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module a file names in an import, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def test_nothing_else_stands_at_the_top() -> None:
    """Besides what Git ignores and names that begin with a dot."""
    ignored = {"build", "dist", "__pycache__"}
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and not path.name.endswith(".egg-info")}
    assert names - ignored == TOP_LEVEL


def test_the_package_is_what_its_description_says() -> None:
    import tomllib

    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = described["project"]
    assert project["name"] == "cavectl" and project["scripts"] == {"cavectl": "cavectl.__main__:main"}
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]
    assert set(project["optional-dependencies"]) == {"test", "plots", "cluster"}
    assert described["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["cavectl", "daemon", "engine"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert any(line.split("#")[0].strip() == "torch==2.13.0" for line in pinned)


def test_there_is_something_to_check() -> None:
    assert all(len(modules(p)) > 3 for p in ("cavectl", "daemon", "engine"))


@pytest.mark.parametrize("path", modules("engine"), ids=str)
def test_the_engine_knows_neither_daemon_nor_cli(path: Path) -> None:
    assert not {n for n in imported(path) if n.split(".")[0] in ("daemon", "cavectl")}


@pytest.mark.parametrize("path", modules("daemon"), ids=str)
def test_the_daemon_knows_of_the_engine_only_plain_data(path: Path) -> None:
    of_engine = {n for n in imported(path) if n.split(".")[0] == "engine"}
    assert of_engine <= DAEMON_MAY_IMPORT_OF_ENGINE
    assert not {n for n in imported(path) if n.split(".")[0] in ("torch", "triton", "numpy", "transformers")}


@pytest.mark.parametrize("path", modules("cavectl"), ids=str)
def test_the_command_line_needs_no_engine(path: Path) -> None:
    of_engine = {n for n in imported(path) if n.split(".")[0] == "engine"}
    assert of_engine <= {"engine.errors"}
    assert not {n for n in imported(path) if n.split(".")[0] in ("torch", "triton", "numpy", "httpx", "huggingface_hub")}


@pytest.mark.parametrize("path", modules("cavectl") + modules("daemon") + modules("engine"), ids=str)
def test_nothing_runs_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & BANNED_CALLS
    assert not {n.split(".")[0] for n in imported(path)} & BANNED_MODULES
    attributes = {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    assert "load_module" not in attributes
    assert "torch.load" not in {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def test_every_import_is_in_pyproject() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[;\[=<>~! ]", d)[0].lower() for d in project["dependencies"]}
    ours = {"cavectl", "daemon", "engine"}
    elsewhere = {  # not run by the installed program
        "engine/bench/llamacpp_side.py": {"llama_cpp", "numpy"},
        "engine/kernels/cpu/hatch_build.py": {"hatchling"},
    }
    names = {"huggingface_hub": "huggingface-hub", "prompt_toolkit": "prompt_toolkit", "pynvml": "nvidia-ml-py"}
    for package in sorted(ours):
        for path in modules(package):
            for name in imported(path):
                top = name.split(".")[0]
                if top in ours or top in sys.stdlib_module_names or top == "__future__":
                    continue
                if top in elsewhere.get(str(path.relative_to(ROOT)), ()):
                    continue
                assert names.get(top, top).lower() in declared, f"{path.relative_to(ROOT)} imports {top}"
