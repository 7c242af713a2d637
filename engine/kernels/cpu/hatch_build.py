"""The package's build hook: a wheel made on a machine with a C++ compiler has the native library in it.

Owned here: where the library lies in the wheel, and the wheel's tag: with the library it is for this system and machine and any
Python, without it for all. How it is compiled is in build.py. Invariant: nothing is left in the source tree, and a wheel is built
whatever the compiler does; without one it lacks the library and one line says why. Run by hatchling alone, never by the program.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HERE = Path(__file__).resolve().parent


class NativeLibraryHook(BuildHookInterface):
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the library and puts it into the wheel. An editable install builds it on first use, as a source tree does."""
        if version == "editable":
            return
        build = _build_module()
        self._folder = tempfile.TemporaryDirectory(prefix="cavectl-wheel-")
        try:
            library = build.compile_library(Path(self._folder.name) / build.NAME)
        except (build.BuildError, OSError) as error:
            print(f"cavectl: this wheel has no native CPU backend: {error}", file=sys.stderr)  # noqa: T201
            return
        build_data["force_include"][str(library)] = f"engine/kernels/cpu/{build.NAME}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._folder is not None:
            self._folder.cleanup()


def _platform() -> str:
    """The system and machine as a wheel's name has them: linux_x86_64."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _build_module() -> ModuleType:
    """build.py beside this file, whatever package named `engine` the building Python may know."""
    spec = importlib.util.spec_from_file_location("cavectl_native_build", _HERE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
