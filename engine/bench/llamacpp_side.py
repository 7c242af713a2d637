"""llama.cpp in process, as the other side of a comparison. Run by an interpreter that has llama-cpp-python, which ours has not.

    OTHER_PYTHON engine/bench/llamacpp_side.py MODEL.gguf [--tests pp128,tg64@4096x8] [--reps N] [--threads N]
    OTHER_PYTHON engine/bench/llamacpp_side.py MODEL.gguf --tokenize TEXT_FILE [--count N]
    OTHER_PYTHON engine/bench/llamacpp_side.py MODEL.gguf --perplexity IDS.json [--window N]

Same notation and work as engine/bench/speed.py: ids drawn from a seed, the likeliest token found and fed again, decoding counts
no prefill, keys and values in float16. One JSON document is the last line of stdout. Stands alone: imports nothing of ours, and
LLAMA_CPP_LIB_PATH may name another build of the libraries. Not part of the product, which never starts it by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

DEFAULT_TESTS = "pp128,pp512,tg128,tg64@4096,tg64x8"
BATCH_TOKENS = 2048
NOTATION = re.compile(r"(pp|tg)([0-9]+)(?:@([0-9]+))?(?:x([0-9]+))?")


class Model:
    """A file in memory, and its vocabulary."""

    def __init__(self, path: str, extra_buffers: bool) -> None:
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)  # the library keeps the pointer
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(None))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = extra_buffers
        self.handle = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self.handle:
            sys.exit(f"llama.cpp did not load {path}")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(self.vocabulary)

    def tokenize(self, text: bytes) -> list[int]:
        ids = (llama_cpp.llama_token * (len(text) + 16))()
        count = llama_cpp.llama_tokenize(self.vocabulary, text, len(text), ids, len(ids), False, False)
        return list(ids[:count])


class Context:
    """A cache for so many sequences of so many tokens, empty at first. To be closed."""

    def __init__(self, model: Model, threads: int, tokens: int, sequences: int = 1) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens * sequences
        parameters.n_seq_max = sequences
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        self._model = model
        self._handle = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            sys.exit("llama.cpp made no context")
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._handle)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._handle), True)

    def feed(self, ids: Sequence[int], sequence: int = 0, *, every: bool = False) -> None:
        """A prompt from position 0; logits of its last token, or of all of them if it is one batch."""
        for first in range(0, len(ids), BATCH_TOKENS):
            part = ids[first : first + BATCH_TOKENS]
            last = first + len(part) == len(ids)
            self._run([(id_, first + i, sequence, every or (last and i == len(part) - 1)) for i, id_ in enumerate(part)])

    def step(self, ids: Sequence[int], position: int) -> list[int]:
        """One token for each sequence, all at `position`; gives the likeliest next ones."""
        self._run([(id_, position, sequence, True) for sequence, id_ in enumerate(ids)])
        return self.likeliest(len(ids))

    def likeliest(self, rows: int) -> list[int]:
        return [int(row) for row in self.logits(rows).argmax(axis=1)]

    def logits(self, rows: int) -> Any:
        """float32 [rows][vocabulary] of the last batch, to be read before the next."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._handle), shape=(rows, self._model.vocab_size))

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (id_, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = id_, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := llama_cpp.llama_decode(self._handle, batch):
            sys.exit(f"llama_decode gave {status}")
        llama_cpp.llama_synchronize(self._handle)


def measure(model: Model, name: str, threads: int, seed: str) -> float:
    """Tokens per second of one run of the test of that name."""
    match = NOTATION.fullmatch(name)
    if match is None or (match[1] == "pp" and (match[3] or match[4])):
        sys.exit(f"no speed test is called {name!r}")
    tokens, sequences = int(match[2]), int(match[4] or 1)
    source = random.Random(f"{seed}/{name}")  # noqa: S311  not for secrets

    def ids(count: int) -> list[int]:
        return [source.randrange(model.vocab_size) for _ in range(count)]

    if match[1] == "pp":
        return prefill(model, threads, ids(tokens), ids(tokens))
    depth = int(match[3] or (128 if sequences > 1 else 1))
    return decode(model, threads, [ids(depth) for _ in range(sequences)], tokens)


def prefill(model: Model, threads: int, warm_up: list[int], measured: list[int]) -> float:
    context = Context(model, threads, len(measured) + 8)
    context.feed(warm_up)
    context.clear()
    start = time.perf_counter()
    context.feed(measured)
    context.likeliest(1)
    seconds = time.perf_counter() - start
    context.close()
    return len(measured) / seconds


def decode(model: Model, threads: int, prompts: list[list[int]], tokens: int) -> float:
    depth = len(prompts[0])
    context = Context(model, threads, depth + tokens + 8, len(prompts))
    for sequence, prompt in enumerate(prompts):
        context.feed(prompt, sequence)
    ids = context.step([prompt[0] for prompt in prompts], depth)
    start = time.perf_counter()
    for number in range(1, tokens + 1):
        ids = context.step(ids, depth + number)
    seconds = time.perf_counter() - start
    context.close()
    return tokens * len(prompts) / seconds


def perplexity(model: Model, threads: int, ids: list[int], window: int) -> dict[str, Any]:
    """exp of the mean negative log-likelihood over windows that share nothing; the first token of each is not counted."""
    context = Context(model, threads, window + 8)
    losses = []
    for first in range(0, len(ids) - window + 1, window):
        part = ids[first : first + window]
        context.clear()
        context.feed(part, every=True)
        logits = context.logits(window)[:-1].astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        norm = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
        losses += (norm - logits[np.arange(window - 1), part[1:]]).tolist()
    context.close()
    return {"perplexity": math.exp(math.fsum(losses) / len(losses)), "tokens": len(losses)}


def speeds(model: Model, names: list[str], threads: int, reps: int, seed: int) -> dict[str, Any]:
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(reps):
        for name in names:
            values[name].append(measure(model, name, threads, f"{seed}/{number}"))
    return {
        name: {"median": statistics.median(of), "min": min(of), "max": max(of), "n": len(of), "unit": "tokens/s"}
        for name, of in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure llama.cpp in process.")
    parser.add_argument("model")
    parser.add_argument("--tests", "--only", default=DEFAULT_TESTS)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-extra-buffers", action="store_true", help="for a build whose AMX kernels this machine cannot run")
    parser.add_argument("--tokenize", metavar="FILE")
    parser.add_argument("--count", type=int)
    parser.add_argument("--perplexity", metavar="IDS")
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    model = Model(options.model, extra_buffers=not options.no_extra_buffers)
    if options.tokenize:
        answer: dict[str, Any] = {"ids": model.tokenize(Path(options.tokenize).read_bytes())[: options.count]}
    elif options.perplexity:
        ids = json.loads(Path(options.perplexity).read_text(encoding="utf-8"))
        answer = perplexity(model, options.threads, ids, options.window)
    else:
        answer = speeds(model, options.tests.split(","), options.threads, options.reps, options.seed)
    answer |= {"llama_cpp_python": llama_cpp.__version__}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
