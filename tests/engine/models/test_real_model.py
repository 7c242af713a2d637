"""The real GGUF, SmolLM2-135M-Instruct in Q4_1: our loader and decoder in float32 against transformers and its own dequantiser.

The oracle's logits (335 MB, every position of three prompts) are kept in the test cache, named by the versions that made them, the
file's hash and the prompts; making them takes a minute.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cache.layout import KvDtype, cache_layout
from engine.models.families import family_for
from engine.runtime.batch import FROM_PREVIOUS, PAGE_TOKENS, Row, SamplingSlot, StepInputs
from engine.runtime.native_executor import NativeExecutor
from engine.runtime.torch_executor import TorchExecutor
from engine.types import SamplingParams
from engine.weights.packed import open_or_pack
from engine.weights.source import open_source
from tests.engine.models.checkpoints import load, logits, oracle

CONTINUED = 64
SENTENCES = (
    "The sky looks blue because air scatters short waves of light more than long ones.",
    "In 1687 a book on motion and gravity changed how people thought about the planets.",
    "Add two cups of flour, a pinch of salt and three eggs, then stir until it is smooth.",
    "def area(radius): return 3.14159 * radius ** 2",
    "She closed the door quietly, put her coat on the chair and looked at the letter again.",
    "Water freezes at 0 degrees and boils at 100 degrees when the pressure is one atmosphere.",
    "What is the capital of France? The capital of France is Paris, on the river Seine.",
    "Yesterday's meeting was moved to Thursday; please bring the report and the budget for 2024.",
    "A prime number has exactly two divisors: 2, 3, 5, 7, 11, 13, 17, 19, 23 and so on.",
    "Once upon a time a small fox lived at the edge of a very old forest.",
)


def prose(vocabulary: list[str], count: int) -> list[int]:
    """`count` ids of sentences, every third with its words in another order; each word cut into the longest known pieces."""
    known = {token: i for i, token in enumerate(vocabulary)}
    rng, ids = random.Random(count), []
    while len(ids) < count:
        words = rng.choice(SENTENCES).split(" ")
        if rng.random() < 1 / 3:
            rng.shuffle(words)
        text = "Ġ" + "Ġ".join(words)  # how byte-level vocabularies spell a space
        while text:
            size = next(n for n in range(len(text), 0, -1) if text[:n] in known)
            ids.append(known[text[:size]])
            text = text[size:]
    return ids[:count]


@pytest.fixture(scope="session")
def prompts(real_model_path: Path) -> dict[str, list[int]]:
    source = open_source(str(real_model_path), "gguf")
    vocabulary = source.info.vocabulary
    source.close()
    assert vocabulary is not None
    return {name: prose(vocabulary.tokens, n) for name, n in (("short", 8), ("medium", 200), ("long", 1500))}


@pytest.fixture(scope="session")
def expected(real_model_path: Path, test_cache: Path, prompts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Logits [n, V] of each prompt, and the ids that greedy decoding appends to the short one."""
    with real_model_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(repr([prompts, CONTINUED, *map(version, ("torch", "transformers", "gguf"))]).encode())
    path = test_cache / f"oracle-{digest.hexdigest()[:16]}.safetensors"
    if path.is_file():
        return load_file(path)
    made = make_expected(real_model_path, prompts)
    if shutil.disk_usage(test_cache).free > 2 << 30:
        partial = path.with_suffix(".partial")
        save_file(made, partial)
        partial.replace(path)
    return made


def make_expected(path: Path, prompts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        made = {name: oracle(model, ids) for name, ids in prompts.items()}
        ids = list(prompts["short"])
        while len(ids) < len(prompts["short"]) + CONTINUED:
            ids.append(int(oracle(model, ids)[-1].argmax()))
    return made | {"continuation": torch.tensor(ids[len(prompts["short"]) :])}


@pytest.fixture(scope="module")
def executor(real_model_path: Path) -> TorchExecutor:
    return load(real_model_path, 2048)[1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["short", "medium", "long"])
def test_logits_equal_transformers(
    name: str, executor: TorchExecutor, prompts: dict[str, list[int]], expected: dict[str, torch.Tensor]
) -> None:
    got = logits(executor, prompts[name])
    assert got.shape == expected[name].shape
    assert (got - expected[name]).abs().max() < 5e-4
    assert torch.equal(got.argmax(-1), expected[name].argmax(-1))


@pytest.mark.timeout(900)
def test_greedy_continuation_equals_transformers(
    executor: TorchExecutor, prompts: dict[str, list[int]], expected: dict[str, torch.Tensor]
) -> None:
    prompt = prompts["short"]
    pages = [list(range(1, 2 + (len(prompt) + CONTINUED) // PAGE_TOKENS))]
    slot = SamplingSlot(slot=0, params=SamplingParams(temperature=0.0), choice=0, prompt=prompt)
    ids: list[int] = []
    while len(ids) < CONTINUED:
        tokens, position = ([FROM_PREVIOUS], len(prompt) + len(ids) - 1) if ids else (prompt, 0)
        row = Row(sequence=1, tokens=tokens, position=position, pages=pages, sampling=0)
        output = executor.submit(StepInputs(step=len(ids), rows=[row], opened=[] if ids else [slot]))
        ids.append(output.rows[0].tokens[0].id)
    assert ids == expected["continuation"].tolist()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_the_native_backend_stays_close_in_4_bits(
    kv_dtype: KvDtype, real_model_path: Path, prompts: dict[str, list[int]], expected: dict[str, torch.Tensor]
) -> None:
    """Its activations are int8, the reference's float32: what that costs, in nats for each of 1,500 positions."""
    got = native_logits(real_model_path, prompts["long"], kv_dtype)
    ours, theirs = got.double().log_softmax(-1), expected["long"].double().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert len(divergence) >= 1000 and float(divergence.min()) > -1e-9
    assert float(divergence.mean()) < 0.01


def native_logits(path: Path, ids: list[int], kv_dtype: KvDtype) -> torch.Tensor:
    source = open_source(str(path), "gguf")
    family = family_for(source.info.architecture)
    spec = family.spec(source.info.config, 2048)
    packed = open_or_pack(source, spec, family.parameters(spec), progress=lambda stage, fraction: None)
    source.close()
    executor = NativeExecutor(spec, packed, cache_layout(spec, kv_dtype), [128], kv_dtype=kv_dtype, threads=2)
    executor.keep_logits()
    parts = []
    for start in range(0, len(ids), 256):
        row = Row(sequence=1, tokens=ids[start : start + 256], position=start, pages=[list(range(128))])
        executor.submit(StepInputs(step=start, rows=[row]))
        parts.append(torch.frombuffer(bytearray(executor.logits()), dtype=torch.float32).view(len(row.tokens), -1))
    executor.close()
    return torch.cat(parts)
