"""Names and paths: rows S01 and S02, the identity of names, and that only one module makes paths."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import daemon.store
from daemon.store import Store
from daemon.store.names import ModelName, name_from_path, nearest, parse_model_name, parse_name
from daemon.store.paths import StorePaths, cached_blob, check_file_name, check_file_names, digest_hex
from engine.errors import CavectlError

HEX = "0123456789abcdef" * 4
BAD_DIGESTS = [
    "sha256:../../x",
    f"sha256:{HEX[:-1]}",
    f"sha256:{HEX}0",
    f"sha256:{HEX.upper()}",
    "sha256-" + HEX,
    "sha256:",
    "",
    f"sha256:{HEX[:-1]}\0",
    f"sha256:%2e%2e{HEX[6:]}",
    "sha256:" + "/" * 64,
    f"sha256:{HEX}\n",
    f"SHA256:{HEX}",
    f"md5:{HEX}",
]


@pytest.mark.parametrize("digest", BAD_DIGESTS)
def test_digest_is_refused_before_a_path_exists(digest: str, tmp_path: Path) -> None:
    with pytest.raises(CavectlError) as caught:
        digest_hex(digest)
    assert caught.value.code == "invalid_name"
    with pytest.raises(CavectlError):
        StorePaths(tmp_path).partial(digest)
    assert list(tmp_path.iterdir()) == []


def test_good_digest(tmp_path: Path) -> None:
    assert digest_hex(f"sha256:{HEX}") == HEX
    assert StorePaths(tmp_path).partial(f"sha256:{HEX}") == tmp_path / "partial" / HEX


@pytest.mark.parametrize("digest", [*BAD_DIGESTS, f"sha256:{HEX}"])
def test_no_entry_takes_a_digest_for_a_name(digest: str, make_store: Callable[..., Store], tmp_path: Path) -> None:
    import asyncio

    store = make_store()
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    for entry in (
        store.get,
        store.remove,
        lambda name: asyncio.run(store.pull(name, print)),
        lambda name: asyncio.run(store.verify(name)),
    ):
        with pytest.raises(CavectlError) as caught:
            entry(digest)
        assert caught.value.code in ("invalid_name", "model_not_found")
    if digest:
        with pytest.raises(CavectlError):
            asyncio.run(store.import_path(source, digest))
    assert not store.root.exists() or not list(store.root.glob("models/**/*"))


@given(
    st.lists(st.text(max_size=40) | st.sampled_from(["..", ".", "/", "a/../b", "C:", "\\", "~", "models"]), min_size=1, max_size=5)
)
def test_every_path_is_inside_or_refused(parts: list[str]) -> None:
    root = Path("/nonexistent/store")
    try:
        path = StorePaths(root).inside(*parts)
    except CavectlError:
        return
    assert path.resolve().is_relative_to(root) and len(path.relative_to(root).parts) == len(parts)


@given(st.text(max_size=60), st.text(max_size=20), st.text(max_size=40))
def test_every_name_that_parses_has_paths_inside(name: str, tag: str, revision: str) -> None:
    paths = StorePaths(Path("/nonexistent/store"))
    for text in (name, f"{name}:{tag}", f"hf.co/{name}:{tag}", f"hf.co/o/r:{tag}"):
        try:
            parsed = parse_model_name(text)
            path = paths.model(parsed, revision)
        except CavectlError:
            continue
        assert path.is_relative_to(paths.variants(parsed)) and path.parent.parent.parent == paths.models()
        assert parse_model_name(parsed.display).key == parsed.key


@given(st.text(max_size=30), st.text(max_size=30))
def test_folders_are_distinct(first: str, second: str) -> None:
    """Two tags or revisions share a folder only when they are the same."""
    paths = StorePaths(Path("/nonexistent/store"))
    try:
        a, b = parse_model_name(f"hf.co/o/r:{first}"), parse_model_name(f"hf.co/o/r:{second}")
        one, two = paths.model(a, "rev"), paths.model(b, "rev")
    except CavectlError:
        return
    assert (one == two) == (a.key == b.key)


def test_link_in_the_store_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "models").symlink_to(outside)
    (root / "staging").symlink_to(root / "staging")
    for parts in (("models",), ("models", "x"), ("staging", "y")):
        with pytest.raises(CavectlError, match="leads out of the store"):
            StorePaths(root).inside(*parts)


@pytest.mark.parametrize(
    ("text", "display"),
    [
        ("smollm2:135m", "smollm2:135m"),
        ("smollm2", "smollm2:latest"),
        ("me/tiny:v1.0", "me/tiny:v1.0"),
        ("hf.co/O/R", "hf.co/O/R:latest"),
        ("HF.co/O/R:Q4_K_M", "hf.co/O/R:Q4_K_M"),
        ("huggingface.co/O/R:sub/m.gguf", "hf.co/O/R:sub/m.gguf"),
        ("модель:7б", "модель:7б"),
    ],
)
def test_names(text: str, display: str) -> None:
    assert parse_model_name(text).display == display


def test_identity() -> None:
    for one, two in [
        ("SmolLM2:135M", "smollm2:135m"),
        ("hf.co/O/R:Q8", "hf.co/o/r:q8"),
        ("é", "e\u0301"),
        ("STRASSE", "straße"),
        ("Å", "\u212b"),
    ]:
        assert parse_model_name(one).key == parse_model_name(two).key
    for one, two in [("hf.co/o/r", "o/r"), ("a", "b"), ("a:1", "a:2")]:
        assert parse_model_name(one).key != parse_model_name(two).key


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        ":a",
        "a/b/c",
        "hf.co/a",
        "hf.co/a/b:",
        "hf.co/../b",
        "hf.co/a/b/c",
        "hf.co/a/b:../../x",
        "hf.co/a/b:/etc/x",
        "a b",
        "-a",
        "a-",
        "a..b",
        "a\\b",
        "a\0",
        "a\nb",
        "x" * 200,
        "./x",
        "../x",
        "~/x",
        "a:b:c",
        "\ud800",
        "hf.co/a/b:c\\d",
        "hf.co/-a/b",
        "a@b",
        "a%2fb",
        ".",
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(CavectlError) as caught:
        parse_model_name(text)
    assert caught.value.code == "invalid_name"
    caught.value.message.encode()  # printable wherever it goes
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["../x", "./m.gguf", "..", ".", "~/m"])
def test_a_relative_path_is_not_a_model_name(text: str) -> None:
    with pytest.raises(CavectlError, match="not a model name") as caught:
        parse_name(text)
    assert (caught.value.code, caught.value.hint) == ("invalid_name", "cavectl list shows the names")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("x:latest", None),
        ("mime:latest", None),
        ("min:latest", "mine:latest"),
        ("smolm2:135m", "smollm2:135m"),
        ("Smollm2:135n", "smollm2:135m"),
        ("llama:135m", None),
        ("tiny/rnd:latest", "tiny/rand:latest"),
        ("gpt-4:latest", None),
    ],
)
def test_only_a_near_name_is_suggested(name: str, near: str | None) -> None:
    assert nearest(name, ["mine:latest", "smollm2:135m", "tiny/rand:latest"]) == near


def test_paths_are_told_from_names() -> None:
    assert parse_name("/a/b.gguf") == Path("/a/b.gguf")
    assert isinstance(parse_name("b.gguf"), ModelName)
    assert name_from_path(Path("/x/My Model (v2).gguf")).display == "My-Model--v2:latest"
    assert name_from_path(Path("/x/Ж é 模型")).display == "Ж-é-模型:latest"
    assert name_from_path(Path("/x/???.gguf")).display == "model:latest"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/a",
        "a/",
        "a//b",
        "a/./b",
        "a/../b",
        "a\\b",
        "C:x",
        "c:",
        "\\\\h\\s",
        "a\0",
        "a\x1f",
        "é" * 128,
        "a/" * 16 + "b",
    ],
)
def test_file_names_that_are_refused(name: str) -> None:
    with pytest.raises(CavectlError):
        check_file_name(name)


def test_file_names_of_one_model() -> None:
    check_file_names(["a", "b/a", "config.json", "моd.gguf"])
    for names in (["A", "a"], ["é", "e\u0301"], ["manifest.json"], ["Info.msgpack"], ["weights.packed"]):
        with pytest.raises(CavectlError):
            check_file_names(names)


@pytest.mark.parametrize("value", ["", "../x", HEX[:-1], HEX.upper(), f"{HEX[:39]}/"])
def test_cached_blob_needs_a_hash(value: str) -> None:
    with pytest.raises(CavectlError):
        cached_blob(Path("/cache"), value)


def test_only_one_module_joins_paths() -> None:
    """No `/` on paths and no os.path.join in the package outside paths.py; `/` by a number is arithmetic."""
    (folder,) = daemon.store.__path__
    for module in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not isinstance(node.right, ast.Constant)
            joins = isinstance(node, ast.Attribute) and ast.unparse(node) == "os.path.join"
            assert module.name == "paths.py" or not (divides or joins), f"{module.name}: {ast.unparse(node)}"
