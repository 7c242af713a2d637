"""How a Python process of ours starts another: the same interpreter, and isolated when this one is.

The launcher that install.sh writes runs `python -I`, so that neither PYTHONPATH nor the working folder decides what `daemon`,
`engine` or any library is; without this a child would lose that. From a source tree (not isolated) PYTHONPATH goes on to the child.
"""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`. Start it in the folder that holds the packages: -m looks there first."""
    isolated = ["-I"] if sys.flags.isolated else []
    return [sys.executable, *isolated, "-m", module, *arguments]
