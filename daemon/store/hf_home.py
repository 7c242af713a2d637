"""What huggingface_hub keeps for this user: the token of a login, and the cache of files.

Its rules for both are asked, not repeated. The library is imported by the first question, on a thread: neither the start of the
daemon nor a pull from a wheel needs it. Nothing in the cache is trusted: what is taken is linked into the store and hashed there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engine.errors import CavectlError

_LOG = logging.getLogger("cavectl.store")


def login_token() -> str:
    """The token to use where the settings give none, "" when nobody logged in. May renew a login that ends soon."""
    import huggingface_hub

    try:
        return huggingface_hub.get_token() or ""
    except (OSError, ValueError) as error:  # without one most models can be had; the hub says so where not
        _LOG.warning("the saved hub token cannot be read: %s", type(error).__name__)
        return ""
    except Exception as error:
        raise CavectlError(
            f"the hub login of this machine cannot be used ({type(error).__name__})",
            hint="log in again with hf auth login, or set CAVECTL_HUB_TOKEN",
            code="hub_unauthorized",
        ) from error


def cached_blobs(repo: str) -> Path:
    """The folder with the cached files of a model repository, each named by the very hash that the hub gives."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).joinpath(repo_folder_name(repo_id=repo, repo_type="model"), "blobs")
