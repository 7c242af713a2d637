"""Families: one translator per `model_type`, from a checkpoint's config to a ModelSpec and from our names to the checkpoint's.

A family is a module with two functions and no state; nothing below it reads a config key. Invariant: a key that changes the maths
and is not understood is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engine.errors import UnsupportedModel
from engine.models.spec import ModelSpec, ParameterInfo


class Family(Protocol):
    def spec(self, config: Mapping[str, Any], context_tokens: int | None) -> ModelSpec:
        """`config` has the keys of a Hugging Face config.json; `context_tokens` is what is configured (None: the model's own)."""
        ...

    def parameters(self, spec: ModelSpec) -> dict[str, ParameterInfo]:
        """Every parameter of the model by our name: what it is called in a checkpoint, and its shape."""
        ...


def family_for(model_type: str) -> Family:
    if model_type in ("llama", "mistral"):
        from engine.models.families import llama

        return llama
    raise UnsupportedModel(f"model type {model_type!r} is not supported", hint="supported types: llama, mistral")
