"""tokenizer.json folders: ids and text equal those of the `tokenizers` library; what is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.hf_vocab import read_tokenizer_folder
from daemon.text.pre_tokenizers import word_split
from daemon.text.tokenizer import Tokenizer
from daemon.text.vocabulary import byte_alphabet
from engine.errors import CavectlError
from tests.fixtures import tiny_tok

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
TEXTS = [
    *json.loads((DATA / "hard_strings.json").read_text()),
    *json.loads((DATA / "smollm2.json").read_text())["random_texts"][:200],
    *("<s>the sky", "the</s>", "a <|im_end|> b", "<|im_start|>user\nhello<|im_end|>\n", "<s><s>", " <s> <tool> a", "x<tool>y"),
]
MARK = "\u2581"
Change = Callable[[dict[str, Any]], None]


def folder_with(folder: Path, change: Change = lambda _: None, config: dict[str, Any] | None = None) -> Path:
    """TinyTok in `folder`, its tokenizer.json changed."""
    tiny_tok.write_tiny_tok(folder)
    path = folder / "tokenizer.json"
    source = json.loads(path.read_text(encoding="utf-8"))
    change(source)
    path.write_text(json.dumps(source), encoding="utf-8")
    if config is not None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return folder


def read(folder: Path, **model_config: Any) -> Tokenizer:
    return Tokenizer(read_tokenizer_folder(folder, model_config))


def template(single: list[dict[str, Any]]) -> dict[str, Any]:
    ids = {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in enumerate(tiny_tok.SPECIALS)}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": ids}


BOS_FIRST = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]


def as_published_llama3(source: dict[str, Any]) -> None:
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    source["post_processor"] = {"type": "Sequence", "processors": [bytes_, template(BOS_FIRST)]}
    source["model"]["ignore_merges"] = True


def with_digits_and_nfc(source: dict[str, Any]) -> None:
    source["normalizer"] = {"type": "NFC"}
    digits = {"type": "Digits", "individual_digits": True}
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, source["pre_tokenizer"]]}


def with_user_token(source: dict[str, Any]) -> None:
    added = source["added_tokens"][0] | {"id": 320, "content": "<tool>", "special": False, "normalized": True}
    source["added_tokens"].append(added)


def with_greedy_specials(source: dict[str, Any]) -> None:
    for added in source["added_tokens"]:
        added["lstrip"], added["rstrip"] = added["content"] == "<s>", added["content"] == "<|im_end|>"


def with_byte_fallback(source: dict[str, Any]) -> None:
    """A vocabulary of space marks and byte tokens, as Llama 2 and Mistral have."""
    letters = [MARK, *"abcdefghijklmnopqrstuvwxyzéABCDE0123456789.,'\"!?"]
    merges = [("t", "h"), ("th", "e"), (MARK, "t"), (MARK, "the"), ("i", "n"), ("e", "r"), (MARK, "a"), (MARK, MARK), ("a", "b")]
    tokens = [*tiny_tok.SPECIALS, *(f"<0x{value:02X}>" for value in range(256)), *letters, *(a + b for a, b in merges)]
    source["model"] |= {
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [f"{left} {right}" for left, right in merges],
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    source["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    source["pre_tokenizer"] = None
    source["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": MARK},
            {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
        ],
    }


def with_metaspace(scheme: str) -> Change:
    def change(source: dict[str, Any]) -> None:
        with_byte_fallback(source)
        source["normalizer"] = None
        source["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": False}

    return change


VARIANTS: dict[str, Change] = {
    "byte-level": lambda _: None,
    "llama3": as_published_llama3,
    "digits-nfc": with_digits_and_nfc,
    "user-token": with_user_token,
    "greedy-specials": with_greedy_specials,
    "byte-fallback": with_byte_fallback,
    "metaspace-first": with_metaspace("first"),
    "metaspace-always": with_metaspace("always"),
    "metaspace-never": with_metaspace("never"),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    folder = folder_with(tmp_path, VARIANTS[request.param])
    return read(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_equal_the_library(variant: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, library = variant
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text


def test_plain_text_equals_the_library_with_special_tokens_off(variant: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, library = variant
    library.encode_special_tokens = True
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=False) == expected, text


def test_decoded_text_equals_the_library(variant: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, library = variant
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, at_start=True) == library.decode(ids, skip_special_tokens=True), text


def test_what_opens_a_text_is_read_from_the_post_processor(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, as_published_llama3, {"add_bos_token": None})
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = read(folder).encode("the sky", add_special=True, parse_special=True)
    assert ids == library.encode("the sky").ids
    assert ids[0] == tiny_tok.BOS


@pytest.mark.parametrize("wanted", [True, False])
def test_the_configuration_overrules_the_post_processor(tmp_path: Path, wanted: bool) -> None:
    tokenizer = read(folder_with(tmp_path, as_published_llama3, {"add_bos_token": wanted}))
    plain = tokenizer.encode("the", add_special=False, parse_special=False)
    assert tokenizer.encode("the", add_special=True, parse_special=True) == [tiny_tok.BOS] * wanted + plain


def test_ends_are_gathered_from_all_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(folder, eos_token_id=11).end_ids == {7, 9, 11, tiny_tok.EOS, tiny_tok.IM_END}


def test_names_in_the_configuration_may_be_objects(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"bos_token": {"content": "<s>", "lstrip": False}})
    tokenizer = read(folder)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_id) == (tiny_tok.BOS, "<s>", tiny_tok.IM_END)


def test_control_tokens_cannot_be_merged_out_of_plain_text(tmp_path: Path) -> None:
    def change(source: dict[str, Any]) -> None:
        vocab = source["model"]["vocab"]
        vocab |= {"<s": 320, "s>": 321}
        source["model"]["merges"] = [["<", "s"], ["<s", ">"]]
        source["pre_tokenizer"]["use_regex"] = False

    tokenizer = read(folder_with(tmp_path, change))
    assert tokenizer.encode("<s>", add_special=False, parse_special=False) == [320, tiny_tok.tokens().index(">")]


def test_the_byte_alphabet_is_the_one_of_the_library() -> None:
    assert byte_alphabet() == tiny_tok.byte_letters()
    assert sorted(byte_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_both_forms_of_a_vocabulary_encode_alike(tmp_path: Path) -> None:
    by_gguf = Tokenizer(read_gguf_vocabulary(tiny_tok.tiny_vocabulary()))
    by_folder = read(folder_with(tmp_path))
    assert by_gguf.special_tokens == by_folder.special_tokens
    for text in TEXTS:
        ids = by_gguf.encode(text, add_special=True, parse_special=True)
        assert ids == by_folder.encode(text, add_special=True, parse_special=True), text


# --- refusals ----------------------------------------------------------------------------------------------------------------


def changed(*path: str, value: Any) -> Change:
    def change(source: dict[str, Any]) -> None:
        place = source
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


REFUSED: dict[str, tuple[Change, str, str]] = {
    "unigram": (changed("model", "type", value="Unigram"), "unsupported_tokenizer", 'tokenizer model "Unigram"'),
    "word-piece": (changed("model", "type", value="WordPiece"), "unsupported_tokenizer", 'tokenizer model "WordPiece"'),
    "normalizer": (changed("normalizer", value={"type": "Precompiled"}), "unsupported_tokenizer", 'normalizer "Precompiled"'),
    "pre-tokenizer": (changed("pre_tokenizer", value={"type": "New"}), "unsupported_tokenizer", 'pre-tokenizer "New"'),
    "slow-pattern": (changed("pre_tokenizer", value=split_by("(a+)+$")), "unsupported_tokenizer", "not known to be safe"),
    "decoder": (changed("decoder", value={"type": "WordPiece"}), "unsupported_tokenizer", "decodes with WordPiece"),
    "no-model": (changed("model", value=None), "corrupt_file", "malformed"),
    "merge-unknown": (changed("model", "merges", value=[["q", "uux"]]), "corrupt_file", "a merge refers to a token"),
    "merge-of-three": (changed("model", "merges", value=[["t", "h", "e"]]), "corrupt_file", "malformed"),
    "prefix-unfit": (changed("model", "continuing_subword_prefix", value="x"), "corrupt_file", "do not fit its vocabulary"),
    "id-huge": (changed("model", "vocab", "a", value=2**31), "corrupt_file", "a token id is 2147483648"),
    "id-negative": (changed("model", "vocab", "a", value=-1), "corrupt_file", "a token id is -1"),
    "id-twice": (changed("model", "vocab", "a", value=3), "corrupt_file", "the same id"),
    "id-text": (changed("model", "vocab", "a", value="x"), "corrupt_file", "malformed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    change, code, message = REFUSED[name]
    with pytest.raises(CavectlError) as error:
        read(folder_with(tmp_path, change))
    assert error.value.code == code
    assert message in error.value.message


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": ' + "[" * 100_000])
def test_broken_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CavectlError, match=r"tokenizer\.json is not"):
        read(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CavectlError, match=r"no tokenizer\.json"):
        read(tmp_path)


def test_a_model_config_naming_an_id_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"bos_token": None})
    with pytest.raises(CavectlError, match="bos_token_id is 9999, outside"):
        read(folder, bos_token_id=9999)


def test_patterns_of_the_table_may_come_in_a_file(tmp_path: Path) -> None:
    for name in ("qwen2", "deepseek-v3", "deepseek-llm", "starcoder"):
        parts = [split_by(pattern) for pattern in word_split(name).patterns]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        value = {"type": "Sequence", "pretokenizers": [*parts, bytes_]}
        read(folder_with(tmp_path, changed("pre_tokenizer", value=value)))
