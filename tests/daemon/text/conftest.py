"""What the text tests read of llama.cpp's source package, from the archive: vocabularies with expected ids, chat templates."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.text.chat_template import TemplateHost
from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.tokenizer import Tokenizer
from engine.types import GgufVocabulary
from engine.weights.gguf import GgufFile
from engine.weights.gguf_vocabulary import read_vocabulary
from tests.daemon.text.rendering import Limits

MODELS = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"
SEPARATOR = "\n__ggml_vocab_test__\n"


@dataclass(frozen=True)
class SourcePackage:
    """The folder that the needed files were put into."""

    folder: Path

    def vocabulary(self, name: str) -> tuple[GgufVocabulary, str]:
        """A vocabulary and what its file calls the model."""
        file = GgufFile(self.folder / f"ggml-vocab-{name}.gguf")
        source = read_vocabulary(file)
        assert source is not None
        return source, file.scalar("general.name", str) or ""

    def vocabulary_names(self) -> set[str]:
        return {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf") for path in self.folder.glob("ggml-vocab-*.gguf")}

    def cases(self, name: str) -> list[tuple[str, list[int]]]:
        """Texts with the ids that llama.cpp's authors expect; none for a vocabulary they give none for."""
        texts = self.folder / f"ggml-vocab-{name}.gguf.inp"
        if not texts.is_file():
            return []
        rows = texts.with_suffix(".out").read_text().splitlines()
        inputs = texts.read_bytes().decode().split(SEPARATOR)
        return [(text, [int(number) for number in row.split()]) for text, row in zip(inputs, rows, strict=False)]

    def templates(self) -> dict[str, str]:
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.jinja"))}


@pytest.fixture(scope="session")
def source_package(llama_cpp_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> SourcePackage:
    folder = tmp_path_factory.mktemp("llama_cpp")
    with tarfile.open(llama_cpp_sdist) as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            wanted = member.name == f"{MODELS}{name}" and name.startswith("ggml-vocab-")
            if wanted or member.name == f"{MODELS}templates/{name}":
                file = archive.extractfile(member)
                assert file is not None
                (folder / name).write_bytes(file.read())
    return SourcePackage(folder)


SUPPORTED = (
    *("baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.fixture(scope="session", params=SUPPORTED)
def vocabulary_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def vocabulary_tokenizer(vocabulary_name: str, source_package: SourcePackage) -> Iterator[Tokenizer]:
    """One after the other, so that only one is in memory."""
    source, model_name = source_package.vocabulary(vocabulary_name)
    yield Tokenizer(read_gguf_vocabulary(source, model_name=model_name))


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def host(runner: asyncio.Runner) -> Iterator[TemplateHost]:
    """A host with time to spare, for what is not about limits."""

    async def make() -> TemplateHost:
        return TemplateHost(Limits(), helpers=1)

    host = runner.run(make())
    yield host
    runner.run(host.close())
