"""Fills a model's parameters from a checkpoint.

Owned here: that the set of tensors is exactly what the spec needs, and the rules for tied embeddings. Not here: reading files (the
sources) and what a parameter means (engine/models). Invariant: names, shapes and types are all checked before anything is
allocated, so no allocation is larger than what the files hold; each parameter is filled once, from its own tensor or not at all.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from engine.errors import CorruptFile, UnsupportedModel
from engine.models.spec import ModelSpec, ParameterInfo
from engine.quant.gguf_types import LOADABLE_TYPES
from engine.weights.source import TensorInfo, WeightSource, listed

_LOG = logging.getLogger(__name__)
EMBEDDING, HEAD = "embed", "head"
_STORED_AS_IS = frozenset({"F64", "F32", "F16", "BF16"})  # the source gives a view of the file
_USABLE = _STORED_AS_IS | LOADABLE_TYPES
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")  # recomputed from the config


class Progress(Protocol):
    def __call__(self, stage: str, fraction: float, /) -> None: ...


def load_weights(
    source: WeightSource,
    spec: ModelSpec,
    names: Mapping[str, ParameterInfo],
    dtype: str,
    device: str,
    progress: Progress,
    warn: Callable[[str], None] = _LOG.warning,
) -> dict[str, torch.Tensor]:
    """Every parameter of `names` by our name, in `dtype` on `device`, owning its memory; a tied head is the embedding itself.

    Raises CorruptFile when tensors are missing or have other shapes, UnsupportedModel when there are tensors that the model does
    not use or types that cannot be computed with.
    """
    wanted = {name: parameter for name, parameter in names.items() if not _absent(parameter, source)}
    check_tensors(source.tensors, wanted)
    if HEAD in wanted and spec.tied_embeddings and _head_is_embedding(source, wanted, warn):
        del wanted[HEAD]
    loaded = {}
    for done, (name, parameter) in enumerate(wanted.items()):
        progress("loading weights", done / len(wanted))
        loaded[name] = _load(source, parameter, getattr(torch, dtype), device)
    if HEAD in names and HEAD not in loaded:
        loaded[HEAD] = loaded[EMBEDDING]
    progress("loading weights", 1.0)
    return loaded


def check_tensors(stored: Mapping[str, TensorInfo], wanted: Mapping[str, ParameterInfo]) -> None:
    """Compares what is stored with what is wanted; each error lists all tensors it is about. Allocates nothing."""
    uses = Counter(name for parameter in wanted.values() for name in parameter.names)
    assert not uses or max(uses.values()) == 1, "two parameters claim one tensor"
    if missing := [name for name in uses if name not in stored]:
        raise CorruptFile(f"the checkpoint lacks {len(missing)} of {len(uses)} tensors: {listed(missing)}")
    if wrong := [text for parameter in wanted.values() for text in _shape_errors(stored, parameter)]:
        raise CorruptFile(f"{len(wrong)} tensors do not fit the model's config: {listed(wrong)}")
    if unusable := [f"{name} ({stored[name].dtype})" for name in uses if stored[name].dtype not in _USABLE]:
        raise UnsupportedModel(f"{len(unusable)} tensors have a type that is not supported: {listed(unusable)}")
    if unused := [name for name in stored if name not in uses and not _HARMLESS.fullmatch(name)]:
        raise UnsupportedModel(f"the checkpoint has {len(unused)} tensors that this model does not use: {listed(unused)}")


def _absent(parameter: ParameterInfo, source: WeightSource) -> bool:
    return parameter.optional and not any(name in source.tensors for name in parameter.names)


def _shape_errors(stored: Mapping[str, TensorInfo], parameter: ParameterInfo) -> Iterator[str]:
    shapes = [stored[name].shape for name in parameter.names]
    rows = sum(shape[0] if shape else 0 for shape in shapes)
    if rows == parameter.shape[0] and all(shape[1:] == parameter.shape[1:] for shape in shapes):
        return
    for name, shape in zip(parameter.names, shapes, strict=True):
        yield f"{name} is {list(shape)}, not {list(parameter.shape)}"


def _head_is_embedding(source: WeightSource, wanted: Mapping[str, ParameterInfo], warn: Callable[[str], None]) -> bool:
    """Whether the head of a checkpoint that says it is tied holds the embedding again. If not, the checkpoint has the last word,
    as in transformers."""
    head, embedding = (source.load(wanted[name].names[0]) for name in (HEAD, EMBEDDING))
    if torch.equal(head, embedding):
        return True
    warn("the config ties head and embedding, but the checkpoint has a head of its own: that one is used")
    return False


def _load(source: WeightSource, parameter: ParameterInfo, dtype: torch.dtype, device: str) -> torch.Tensor:
    parts = [_load_part(source, name, dtype, device) for name in parameter.names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _load_part(source: WeightSource, name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    stored = source.load(name)
    converted = stored.to(device, dtype)
    borrowed = converted is stored and source.tensors[name].dtype in _STORED_AS_IS
    return converted.clone() if borrowed else converted
