"""Which tensors of a checkpoint a model takes, and that they are what it needs.

Owned here: that the set of tensors is exactly what the spec needs, and the names with which a tied head is recognised. Not here:
reading their bytes, and whether a head holds the embedding again (loader.py, packing.py: each compares in its own way).
Invariant: names, shapes and types are all checked before anything is allocated. No torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from engine.errors import CorruptFile, UnsupportedModel
from engine.models.spec import ParameterInfo
from engine.quant.gguf_types import LOADABLE_TYPES
from engine.weights.source import TensorInfo, listed

EMBEDDING, HEAD = "embed", "head"
OTHER_HEAD = "the config ties head and embedding, but the checkpoint has a head of its own: that one is used"
STORED_AS_IS = frozenset({"F64", "F32", "F16", "BF16"})  # numbers, not blocks of them
_USABLE = STORED_AS_IS | LOADABLE_TYPES
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")  # recomputed from the config


def wanted_parameters(stored: Mapping[str, TensorInfo], parameters: Mapping[str, ParameterInfo]) -> dict[str, ParameterInfo]:
    """The parameters that the checkpoint holds, all checked: every one but optional ones that are absent.

    Raises CorruptFile when tensors are missing or have other shapes, UnsupportedModel when there are tensors that the model does
    not use or types that cannot be computed with.
    """
    wanted = {
        name: parameter
        for name, parameter in parameters.items()
        if not parameter.optional or any(part in stored for part in parameter.names)
    }
    check_tensors(stored, wanted)
    return wanted


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


def _shape_errors(stored: Mapping[str, TensorInfo], parameter: ParameterInfo) -> Iterator[str]:
    shapes = [stored[name].shape for name in parameter.names]
    rows = sum(shape[0] if shape else 0 for shape in shapes)
    if rows == parameter.shape[0] and all(shape[1:] == parameter.shape[1:] for shape in shapes):
        return
    for name, shape in zip(parameter.names, shapes, strict=True):
        yield f"{name} is {list(shape)}, not {list(parameter.shape)}"
