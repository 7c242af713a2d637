"""Reads config.json of a model folder and says what the folder is.

Owned here: config.json as data, and ModelInfo from it. Not here: what its keys do (engine/models/families). Invariant: nothing in
the folder is executed or imported, whatever the config asks for (`auto_map`, `trust_remote_code`): a model type that has no family
here is refused. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import CorruptFile, UnsupportedModel
from engine.models.families import family_for
from engine.types import ModelInfo
from engine.weights.config_checks import check_config
from engine.weights.json_file import read_json_object
from engine.weights.source import TensorInfo, main_type

MAX_CONFIG_BYTES = 4 << 20


def read_config(folder: Path) -> dict[str, Any]:
    config = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModel("config.json has no model_type")
    family_for(model_type)
    check_config(_flat(config))
    _check_portable(config)
    return config


def folder_info(config: dict[str, Any], tensors: Mapping[str, TensorInfo], warnings: list[str]) -> ModelInfo:
    flat = _flat(config)
    return ModelInfo(
        format="safetensors",
        architecture=config["model_type"],
        name="",
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        weight_bytes=sum(tensor.bytes for tensor in tensors.values()),
        quantization=main_type(tensors.values()),
        context_tokens=flat["max_position_embeddings"],
        embedding_length=flat["hidden_size"],
        layers=flat["num_hidden_layers"],
        vocab_size=flat["vocab_size"],
        config=config,
        metadata={key: value for key, value in config.items() if isinstance(value, str | int | float | bool)},
        warnings=warnings,
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes may stand in a nested text_config only."""
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise CorruptFile("config.json: text_config is not an object")
    return {**nested, **config}


def _check_portable(config: dict[str, Any]) -> None:
    """Numbers beyond 64 bits and broken strings could not be handed to the daemon."""
    try:
        msgspec.msgpack.encode(config)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise CorruptFile("config.json holds a value that is not plain text or a 64-bit number") from error
