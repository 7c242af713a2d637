"""Which files of a repository or a folder make the model, by name alone.

A GGUF is one file. Its choice: the named file; else the named quantisation; else the first of DEFAULT_QUANTS that is there; else
the only one. Without a GGUF: config, tokenizer and safetensors at the top level. Pickles (.bin, .pt, ...) are never part of a
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from posixpath import basename

import msgspec

from daemon.store.names import DEFAULT_TAG, fold, show
from daemon.store.paths import check_file_name
from engine.errors import CavectlError, CorruptFile, UnsupportedModel

DEFAULT_QUANTS = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q4_1", "Q6_K", "Q8_0", "BF16", "F16", "F32")
INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_INDEX_BYTES = 64 << 20
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.(gguf|safetensors)$", re.IGNORECASE)
_PICKLE = re.compile(r"\.(bin|pt|pth|ckpt|pkl|pickle)$", re.IGNORECASE)
_OTHER_GGUF = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_SHOWN = 8


class NoSuchFile(CavectlError):
    code = "hub_not_found"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def choose_files(names: Sequence[str], selector: str = DEFAULT_TAG) -> tuple[str, ...]:
    """The files to take, in the order to fetch them. UnsupportedModel or NoSuchFile when there is no clear choice."""
    ggufs = [name for name in names if name.lower().endswith(".gguf") and not _OTHER_GGUF.search(basename(name))]
    if fold(selector) != DEFAULT_TAG:
        return (_refuse_split(_selected(ggufs, selector)),)
    if ggufs:
        return (_refuse_split(_default(ggufs)),)
    return _folder_files(names)


def weights_entry(names: Iterable[str]) -> str:
    """What to open of a chosen set: the GGUF, or "" for the folder."""
    return next((name for name in names if name.lower().endswith(".gguf")), "")


def check_index(data: bytes, names: Iterable[str]) -> None:
    """Every shard that the index names is among `names`; all missing ones are told together."""
    try:
        shards = sorted(set(msgspec.json.decode(data, type=_Index).weight_map.values()))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"{INDEX} cannot be read: {error}") from error
    for shard in shards:
        check_file_name(shard)
    missing = sorted(set(shards) - set(names))
    if missing:
        raise CorruptFile(
            f"{len(missing)} of {len(shards)} weight files are missing: {_listed(missing)}", hint="get the missing files first"
        )


def _selected(ggufs: list[str], selector: str) -> str:
    wanted = fold(selector)
    named = [name for name in ggufs if fold(name) == wanted] or [name for name in ggufs if fold(basename(name)) == wanted]
    quant = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9]|_[a-z0-9])")
    found = (
        named
        or [name for name in ggufs if quant.search(fold(basename(name)))]
        or [name for name in ggufs if quant.search(fold(name))]
    )
    whole = [name for name in found if not _SPLIT.search(name)]
    if not found:
        there = f"there are {_listed(ggufs)}" if ggufs else "it has no GGUF files; leave the part after the colon out"
        raise NoSuchFile(f"no GGUF file fits {show(selector)}", hint=there)
    if len(whole) > 1:
        raise NoSuchFile(f"{len(whole)} GGUF files fit {show(selector)}", hint=f"name one: {_listed(whole)}")
    return (whole or found)[0]


def _default(ggufs: list[str]) -> str:
    for quant in DEFAULT_QUANTS:
        try:
            return _selected(ggufs, quant)
        except NoSuchFile:
            continue
    if len(ggufs) == 1:
        return ggufs[0]
    raise NoSuchFile("none of the GGUF files is a clear choice", hint=f"name one after a colon: {_listed(ggufs)}")


def _refuse_split(name: str) -> str:
    if _SPLIT.search(name):
        raise UnsupportedModel(
            f"{basename(name)} is one part of a split GGUF", hint="merge the parts, or choose a file that is whole"
        )
    return name


def _folder_files(names: Sequence[str]) -> tuple[str, ...]:
    present = set(names)
    side = tuple(name for name in SIDE_FILES if name in present)
    weights = _safetensors(present)
    if not weights:
        if any(_PICKLE.search(name) for name in names):
            raise UnsupportedModel(
                "the weights are pickle files, which can run code and are never loaded",
                hint="look for a safetensors or GGUF version",
            )
        raise UnsupportedModel("there is no GGUF and no safetensors file")
    if "config.json" not in present:
        raise UnsupportedModel("there is no config.json beside the safetensors files")
    return side + weights


def _safetensors(present: set[str]) -> tuple[str, ...]:
    """`model.safetensors`, or the index with its shards (all of 1 to N there), or the only safetensors file."""
    if "model.safetensors" in present:
        return ("model.safetensors",)
    top = sorted(name for name in present if name.endswith(".safetensors") and "/" not in name)
    if INDEX not in present:
        return tuple(top) if len(top) == 1 else ()
    shards = [name for name in top if name.startswith("model-") and _SPLIT.search(name)]
    totals = {int(match[2]) for name in shards if (match := _SPLIT.search(name))}
    if len(totals) == 1:
        total = totals.pop()
        missing = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, min(total, 10_000) + 1)]
        missing = [name for name in missing if name not in present]
        if missing:
            raise CorruptFile(f"{len(missing)} of {total} weight files are missing: {_listed(missing)}")
    return (INDEX, *(shards or top))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
