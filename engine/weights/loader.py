"""Fills a model's parameters from a checkpoint.

Owned here: filling them with torch, and the rule for tied embeddings. Not here: which tensors there must be (tensor_set.py),
reading files (the sources) and what a parameter means (engine/models). Invariant: everything is checked before anything is
allocated, so no allocation is larger than what the files hold; each parameter is filled once, from its own tensor or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from engine.models.spec import ModelSpec, ParameterInfo
from engine.weights.source import Progress, WeightSource
from engine.weights.tensor_set import EMBEDDING, HEAD, OTHER_HEAD, STORED_AS_IS, wanted_parameters

_LOG = logging.getLogger(__name__)


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
    wanted = wanted_parameters(source.tensors, names)
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


def _head_is_embedding(source: WeightSource, wanted: Mapping[str, ParameterInfo], warn: Callable[[str], None]) -> bool:
    """Whether the head of a checkpoint that says it is tied holds the embedding again. If not, the checkpoint has the last word,
    as in transformers."""
    head, embedding = (source.load(wanted[name].names[0]) for name in (HEAD, EMBEDDING))
    if torch.equal(head, embedding):
        return True
    warn(OTHER_HEAD)
    return False


def _load(source: WeightSource, parameter: ParameterInfo, dtype: torch.dtype, device: str) -> torch.Tensor:
    parts = [_load_part(source, name, dtype, device) for name in parameter.names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _load_part(source: WeightSource, name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    stored = source.load(name)
    converted = stored.to(device, dtype)
    borrowed = converted is stored and source.tensors[name].dtype in STORED_AS_IS  # the source gave a view of the file
    return converted.clone() if borrowed else converted
