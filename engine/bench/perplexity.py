"""`python -m engine.bench.perplexity MODEL --ids FILE`: how well a backend predicts a text, against float32 on the same weights.

The text is given as token ids, so that two programs can be given the same ones. Windows share nothing; the first token of each is
not counted. The reference is the torch backend on dequantised weights, float32 throughout; besides both perplexities it gives the
mean Kullback-Leibler divergence of the backend's distributions from the reference's. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine import platform
from engine.bench.subject import Setup, Subject, load_subject
from engine.cache.blocks import pages_for
from engine.errors import CavectlError, InvalidRequest
from engine.runtime.batch import Row, StepInputs

WINDOW_TOKENS = 512


class Evaluable(Protocol):
    """What an executor has for evaluation."""

    def keep_logits(self, on: bool) -> None: ...

    def logits(self) -> bytes: ...


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Perplexities: exp of the mean negative log-likelihood. `divergence` in nats per token."""

    benchmark: str = "perplexity"
    schema: int = 1
    backend: str
    kv_dtype: str
    perplexity: float
    reference: float
    divergence: float
    tokens: int  # counted
    window: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Summed over the counted tokens of one window, in nats."""

    ours: float
    reference: float
    divergence: float


def measure(
    model: str, ids: Sequence[int], window: int, backend: str, kv_dtype: str, threads: int | None, say: Callable[[str], object]
) -> Document:
    """Raises InvalidRequest when there is less text than one window, and what loading raises."""
    parts = [ids[first : first + window] for first in range(0, len(ids) - window + 1, window)]
    if not parts or window < 2:
        raise InvalidRequest(f"{len(ids)} tokens are no window of {window}", hint="give a longer text or a smaller --window")

    def load(backend: str, kv_dtype: str) -> Any:
        setup = Setup(
            context_tokens=window,
            max_step_tokens=window,
            max_sequences=1,
            least_pages=pages_for(window),
            backend=backend,
            kv_dtype=kv_dtype,
            threads=threads,
        )
        return load_subject(model, lambda stage, fraction: None if fraction else say(f"{backend}: {stage}"), setup)

    ours, reference = load(backend, kv_dtype), load("reference", "float32")
    losses = []
    for number, part in enumerate(parts):
        losses.append(window_losses(window_logits(ours.subject, part), window_logits(reference.subject, part), part))
        say(f"window {number + 1} of {len(parts)}")
    counted = len(parts) * (window - 1)
    return Document(
        backend=ours.info.backend,
        kv_dtype=ours.info.kv_dtype,
        perplexity=math.exp(math.fsum(loss.ours for loss in losses) / counted),
        reference=math.exp(math.fsum(loss.reference for loss in losses) / counted),
        divergence=math.fsum(loss.divergence for loss in losses) / counted,
        tokens=counted,
        window=window,
    )


def window_logits(subject: Subject, ids: Sequence[int]) -> bytes:
    """float32 [tokens][vocabulary] of one sequence that stands alone."""
    executor: Any = subject.executor
    if not hasattr(executor, "keep_logits"):
        raise CavectlError("this backend gives no logits to evaluate", code="unsupported")
    evaluable: Evaluable = executor
    evaluable.keep_logits(True)
    pages = [[0] if group.kind == "state" else list(range(pages_for(len(ids)))) for group in subject.layout.groups]
    executor.collect(executor.submit(StepInputs(step=1, rows=[Row(sequence=0, tokens=list(ids), position=0, pages=pages)])))
    return evaluable.logits()


def window_losses(ours: bytes, reference: bytes, ids: Sequence[int]) -> Losses:
    """Both sides' losses on what follows each token, and how far ours is from the reference, in float64."""
    mine, theirs = (_log_probabilities(logits, len(ids)) for logits in (ours, reference))
    ours_loss = reference_loss = divergence = 0.0
    for id_, p, q in zip(ids[1:], mine, theirs, strict=False):
        ours_loss -= float(p[id_])
        reference_loss -= float(q[id_])
        divergence += float((q.exp() * (q - p)).sum())
    return Losses(ours_loss, reference_loss, divergence)


def _log_probabilities(logits: bytes, tokens: int) -> Iterator[Any]:
    """float64 [V] of each token in turn: all at once would take a gigabyte."""
    import torch

    rows = torch.frombuffer(bytearray(logits), dtype=torch.float32).view(tokens, -1)
    return (row.double().log_softmax(dim=0) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    platform.limit_spinning()
    platform.expect_no_numpy()
    try:
        answer: Any = measure(
            options.model,
            _ids(Path(options.ids)),
            options.window,
            options.backend,
            options.kv_dtype,
            options.threads,
            lambda text: sys.stderr.write(f"{text}\n"),
        )
    except CavectlError as error:
        answer = {"error": error.info}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return int(isinstance(answer, dict))


def _ids(path: Path) -> list[int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[int])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path.name} is no JSON list of token ids: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.perplexity", description="Measure how well a model predicts a text."
    )
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("--ids", required=True, metavar="FILE", help="a JSON list of token ids")
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, metavar="TOKENS")
    parser.add_argument("--backend", choices=("auto", "reference", "cpu"), default="auto")
    parser.add_argument("--kv-dtype", default="", choices=("", "float32", "float16", "int8"))
    parser.add_argument("--threads", type=int, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
