"""Where the Hugging Face cache of this user is. Its blobs are named by the very hash that the hub gives, so a file is found by name
alone.

Nothing there is trusted: what is taken is linked into the store first and hashed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def hf_cache_root(environ: Mapping[str, str]) -> Path | None:
    """The folder that holds `models--owner--repo`; None when the environment names no home."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser().joinpath("hub")
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).joinpath("huggingface", "hub")
    return Path(environ["HOME"]).joinpath(".cache", "huggingface", "hub") if environ.get("HOME") else None
