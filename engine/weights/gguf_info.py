"""Says what a GGUF file is: ModelInfo from its metadata and tensor table.

Owned here: putting the parts together. Not here: the parts (gguf.py, gguf_arch.py, gguf_vocabulary.py). Invariant: no weight is
read, and no torch is needed; a model that this would accept but the loader could never load is refused here by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.quant.gguf_types import LOADABLE_TYPES
from engine.types import GgufVocabulary, ModelInfo
from engine.weights.gguf import GgufFile
from engine.weights.gguf_cursor import GgufArray
from engine.weights.gguf_vocabulary import read_vocabulary
from engine.weights.source import TensorInfo, main_type

MAX_TEMPLATE_CHARACTERS = 1 << 20
_TEMPLATE = "tokenizer.chat_template"


def gguf_info(file: GgufFile, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelInfo:
    """`config` and `tensors` are the file's, translated to those of a checkpoint."""
    _refuse_unloadable(file)
    vocabulary = read_vocabulary(file)
    return ModelInfo(
        format="gguf",
        architecture=config["model_type"],
        name=file.scalar("general.name", str) or "",
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        weight_bytes=sum(tensor.bytes for tensor in tensors.values()),
        quantization=main_type(tensors.values()),
        context_tokens=config["max_position_embeddings"],
        embedding_length=config["hidden_size"],
        layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        config=config,
        metadata={k: v for k, v in file.metadata.items() if not isinstance(v, GgufArray) and not k.startswith(_TEMPLATE)},
        chat_template=_chat_template(file),
        vocabulary=vocabulary,
        warnings=_vocabulary_warnings(file, vocabulary, config["vocab_size"]),
    )


def _refuse_unloadable(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        if tensor.type.name not in LOADABLE_TYPES:
            raise file.unsupported(
                f"the tensor {tensor.name} has the type {tensor.type.name}, which is not supported",
                f"supported types: {', '.join(sorted(LOADABLE_TYPES))}",
            )


def _chat_template(file: GgufFile) -> str | None:
    template = file.scalar(_TEMPLATE, str)
    if template is not None and len(template) > MAX_TEMPLATE_CHARACTERS:
        raise file.corrupt(f"the chat template has {len(template)} characters")
    return template


def _vocabulary_warnings(file: GgufFile, vocabulary: GgufVocabulary | None, rows: int) -> list[str]:
    if vocabulary is None:
        return ["the file has no vocabulary"]
    named = len(vocabulary.tokens)
    if named > rows:
        raise file.corrupt(f"the vocabulary has {named} tokens, and token_embd.weight has {rows} rows")
    return [f"the vocabulary names {named} of {rows} tokens"] if named < rows else []
