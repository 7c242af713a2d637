"""Models on a hub that speaks the Hugging Face API: which files a repository offers, their hashes, and where to fetch each.

The wire is huggingface_hub's (the tests run its client against the same server), and so are the login and the cache (hf_home.py);
the requests are our own (transport.py, fetch.py), for that client bounds neither answers nor redirects. All files of a pull are of
one commit, asked once. Names and hashes from the hub are checked here before anything uses them.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from daemon.store.catalog import CatalogFile
from daemon.store.fetch import FileFetcher
from daemon.store.hf_home import cached_blobs
from daemon.store.names import DEFAULT_TAG
from daemon.store.partials import Checksum, Partial, WantedFile
from daemon.store.paths import cached_blob, check_file_name, check_file_names
from daemon.store.selection import NoSuchFile, choose_files
from daemon.store.sources import Plan, Report
from daemon.store.transport import FetchError
from engine.errors import CavectlError

MAX_FILES = 20_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LICENCE_TAG = "license:"


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blob_id: str | None = msgspec.field(name="blobId", default=None)
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]
    card: dict[str, Any] | None = msgspec.field(name="cardData", default=None)
    tags: list[str] = []


@dataclass(frozen=True, slots=True)
class HubSource:
    """`files` of a catalog entry are taken as they are named there; else `selector` chooses (selection.py)."""

    repo: str
    fetcher: FileFetcher
    revision: str = "main"
    selector: str = DEFAULT_TAG
    files: tuple[CatalogFile, ...] = ()

    @property
    def extra_bytes(self) -> int:
        return 0

    async def plan(self) -> Plan:
        repository, _ = await asyncio.gather(self._repository(), asyncio.to_thread(cached_blobs, self.repo))  # an import, once
        siblings = {sibling.rfilename: sibling for sibling in repository.siblings}
        if self.files:
            wanted = tuple(self._pinned(file, siblings) for file in self.files)
        else:
            chosen = choose_files(list(siblings), self.selector)
            check_file_names(chosen)
            wanted = tuple(_wanted(siblings[name]) for name in chosen)
        return Plan(f"hf.co/{self.repo}@{repository.sha}", repository.sha, _licence(repository), wanted)

    async def fetch(self, plan: Plan, wanted: WantedFile, partial: Partial, report: Report) -> None:
        url = f"{self.fetcher.transport.endpoint}/{self.repo}/resolve/{plan.revision}/{quote(wanted.name)}"
        await self.fetcher.fetch(url, partial, report)

    def cached(self, wanted: WantedFile) -> list[Path]:
        return [cached_blob(cached_blobs(self.repo), wanted.check.value)]

    async def _repository(self) -> _Repository:
        url = f"{self.fetcher.transport.endpoint}/api/models/{self.repo}/revision/{quote(self.revision, safe='')}?blobs=true"
        data = await self.fetcher.retries.run(lambda: self.fetcher.transport.read(url))
        try:
            repository = msgspec.json.decode(data, type=_Repository)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise FetchError(f"the hub's description of {self.repo} cannot be read", "network_error") from None
        if not _COMMIT.fullmatch(repository.sha):
            raise FetchError(f"the hub names no commit of {self.repo}", "network_error")
        if len(repository.siblings) > MAX_FILES:
            raise FetchError(f"{self.repo} has more than {MAX_FILES} files", "network_error")
        for sibling in repository.siblings:
            check_file_name(sibling.rfilename)
        return repository

    def _pinned(self, file: CatalogFile, siblings: dict[str, _Sibling]) -> WantedFile:
        if file.name not in siblings:
            raise NoSuchFile(f"{self.repo} has no {file.name}")
        wanted = _wanted(siblings[file.name])
        if not file.sha256:
            return wanted
        if wanted.size != file.size or (wanted.check.kind == "sha256" and wanted.check.value != file.sha256):
            raise CavectlError(f"{file.name} of {self.repo} is not the file of the catalog", code="hash_mismatch")
        return WantedFile(file.name, file.size, Checksum("sha256", file.sha256))


def _wanted(sibling: _Sibling) -> WantedFile:
    """The strongest hash that the hub gives for a file; a file without one is not taken."""
    if sibling.lfs is not None and _SHA256.fullmatch(sibling.lfs.sha256) and sibling.lfs.size >= 0:
        return WantedFile(sibling.rfilename, sibling.lfs.size, Checksum("sha256", sibling.lfs.sha256))
    if (
        sibling.lfs is None
        and sibling.blob_id
        and _COMMIT.fullmatch(sibling.blob_id)
        and sibling.size is not None
        and sibling.size >= 0
    ):
        return WantedFile(sibling.rfilename, sibling.size, Checksum("git", sibling.blob_id))
    raise CavectlError(f"the hub gives no hash for {sibling.rfilename}, so it cannot be checked", code="hash_mismatch")


def _licence(repository: _Repository) -> str:
    named = (repository.card or {}).get("license")
    if isinstance(named, str):
        return named[:128]
    return next((tag.removeprefix(_LICENCE_TAG)[:128] for tag in repository.tags if tag.startswith(_LICENCE_TAG)), "")
