"""Hugging Face tokenizer folders (tokenizer.json, tokenizer_config.json) turned into a `Vocabulary`.

Owns: which parts of a tokenizer.json are understood (BPE models; the normalizers, pre-tokenizers and decoders listed below) and the
checks of S10. Anything else is refused by name. Nothing of the folder is run; a pattern is compiled only if it is a known one.
Invariant: for text without special tokens the ids are those of the `tokenizers` library for the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from daemon.text.pre_tokenizers import is_known_pattern
from daemon.text.vocabulary import (
    END_SPELLINGS,
    Marker,
    Vocabulary,
    bytes_of_letters,
    bytes_of_marked,
    check_byte_tokens,
    check_id,
    check_sizes,
    end_ids,
    unsupported,
)
from engine.errors import CorruptFile

MAX_FILE_BYTES = 256 << 20
NORMALIZERS = {"NFC": 3, "NFD": 1, "Replace": 1, "Prepend": 1, "Sequence": 1}  # with the factor by which each may shrink text
PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Sequence", "Whitespace", "WhitespaceSplit")
)
SAFE_REPLACED = frozenset((" {2,}",))


def read_tokenizer_folder(folder: Path, model_config: Mapping[str, Any]) -> Vocabulary:
    """Raises `corrupt_file`, or `unsupported_tokenizer` naming what is not understood."""
    if not (folder / "tokenizer.json").is_file():
        raise unsupported("the model folder has no tokenizer.json", hint="only tokenizers in that format can be read")
    source = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    generation = _read_json(folder / "generation_config.json", missing_ok=True)
    try:
        return _assemble(source, config, generation, model_config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptFile(f"tokenizer.json is malformed ({type(error).__name__})") from error


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CorruptFile(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptFile(f"{path.name} is not valid JSON") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path.name} is not a JSON object")
    return value


def _assemble(
    source: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], model_config: Mapping[str, Any]
) -> Vocabulary:
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise unsupported(f'tokenizer model "{model["type"]}" is not supported', hint="BPE models are")
    spellings = _spellings(model["vocab"], source["added_tokens"])
    ids = {token: number for number, token in spellings.items()}
    named = {key: ids.get(_content(config.get(f"{key}_token")) or "") for key in ("bos", "eos")}
    for key in ("bos", "eos"):
        if named[key] is None and isinstance(value := model_config.get(f"{key}_token_id"), int):
            named[key] = check_id(f"{key}_token_id", value, max(spellings) + 1)
    ends = (*_id_list(generation.get("eos_token_id")), *_id_list(model_config.get("eos_token_id")), named["eos"])
    added = [_Added(entry, named.values()) for entry in source["added_tokens"]]
    control = {entry.id for entry in added if entry.control}
    encoder, continued = _encoders(source, ids, added, control)
    prefix, suffix = _affixes(source.get("post_processor"), config, ids, named)
    return Vocabulary(
        encoder=encoder,
        continued=continued,
        markers=tuple(entry.marker for entry in added if entry.control),
        token_bytes=_token_bytes(source, spellings, added),
        bos_id=named["bos"],
        eos_id=named["eos"],
        end_ids=end_ids(((spellings[number], number) for number in control), (end for end in ends if end in spellings)),
        prefix=prefix,
        suffix=suffix,
        leading_space=any(part["type"] == "Strip" for part in _parts(source.get("decoder"), "decoders")),
        shrink=max((NORMALIZERS[part["type"]] for part in _parts(source.get("normalizer"), "normalizers")), default=1),
    )


class _Added:
    """An entry of `added_tokens`; `control` also when the configuration names it, or its spelling ends texts."""

    def __init__(self, entry: dict[str, Any], named: Any) -> None:
        self.id: int = entry["id"]
        self.spelling: str = entry["content"]
        self.control: bool = bool(entry["special"]) or self.id in named or self.spelling in END_SPELLINGS
        self.normalized: bool = bool(entry["normalized"])
        self._edges = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "single_word")}

    @property
    def marker(self) -> Marker:
        return Marker(self.id, self.spelling, control=True, **self._edges)

    @property
    def token(self) -> AddedToken:
        return AddedToken(self.spelling, normalized=self.normalized, special=False, **self._edges)


def _spellings(vocab: dict[str, int], added: list[dict[str, Any]]) -> dict[int, str]:
    """Every id of the file with its spelling; ids are distinct and in a sane range."""
    check_sizes(len(vocab) + len(added), 0)
    spellings = {number: token for token, number in vocab.items()}
    if len(spellings) != len(vocab):
        raise CorruptFile("two tokens of the vocabulary have the same id")
    for entry in added:
        spellings[entry["id"]] = entry["content"]
    for number in (min(spellings), max(spellings)):
        check_id("a token id", number, 4 * len(spellings))
    return spellings


def _encoders(source: dict[str, Any], ids: dict[str, int], added: list[_Added], control: set[int]) -> tuple[Tokenizer, Tokenizer]:
    """One encoder for a text that opens the input, one for text further on (they differ where only the first word gets a space)."""
    model = source["model"]
    _check_parts(source)
    vocab = {token: number for token, number in model["vocab"].items() if number not in control}
    vocab |= {entry.spelling: entry.id for entry in added if not entry.control}
    merges = [_pair(merge) for merge in model["merges"]]
    check_sizes(len(vocab), len(merges))
    options = {key: model[key] for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)}
    if model.get("unk_token") in vocab:
        options["unk_token"] = model["unk_token"]
    flags = {key: bool(model.get(key)) for key in ("fuse_unk", "byte_fallback", "ignore_merges")}
    merges = [pair for pair in merges if _is_plain(pair, vocab, ids)]
    try:
        bpe = BPE(vocab, merges, **options, **flags)
    except Exception as error:  # the library raises nothing narrower
        raise CorruptFile("tokenizer.json: its merges do not fit its vocabulary") from error
    pre_tokenizer = source.get("pre_tokenizer")
    tokens = [entry.token for entry in added if not entry.control]
    encoder = _encoder(bpe, source.get("normalizer"), pre_tokenizer, tokens)
    later = _without_first_space(pre_tokenizer)
    return encoder, encoder if later == pre_tokenizer else _encoder(bpe, source.get("normalizer"), later, tokens)


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _is_plain(pair: tuple[str, str], vocab: dict[str, int], ids: dict[str, int]) -> bool:
    left, right = pair
    if left not in ids or right not in ids or left + right not in ids:
        raise CorruptFile("a merge refers to a token that is not in the vocabulary")
    return left in vocab and right in vocab and left + right in vocab


def _encoder(bpe: BPE, normalizer: Any, pre_tokenizer: Any, tokens: list[AddedToken]) -> Tokenizer:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": empty}
    try:
        encoder = Tokenizer.from_str(json.dumps(shell))
    except Exception as error:  # the library raises bare Exception
        raise CorruptFile("tokenizer.json describes a normalizer or pre-tokenizer that cannot be built") from error
    encoder.model = bpe
    encoder.add_tokens(tokens)
    return encoder


def _without_first_space(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        return {**part, "pretokenizers": [_without_first_space(inner) for inner in part["pretokenizers"]]}
    if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
        return {**part, "prepend_scheme": "never"}
    return part


def _parts(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    yield part
    for child in part.get(inner, ()):
        yield from _parts(child, inner)


def _check_parts(source: dict[str, Any]) -> None:
    for part in _parts(source.get("normalizer"), "normalizers"):
        _check_part("normalizer", part, NORMALIZERS)
    for part in _parts(source.get("pre_tokenizer"), "pretokenizers"):
        _check_part("pre-tokenizer", part, PRE_TOKENIZERS)


def _check_part(kind: str, part: dict[str, Any], known: Any) -> None:
    if part["type"] not in known:
        raise unsupported(f'{kind} "{part["type"]}" is not supported')
    pattern = part.get("pattern", {}).get("Regex")
    if pattern is not None and not is_known_pattern(pattern) and pattern not in SAFE_REPLACED:
        raise unsupported(f"the {kind} splits by a pattern that is not known to be safe: {pattern[:60]!r}")


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _id_list(value: Any) -> list[int]:
    return [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]


def _affixes(
    processor: Any, config: dict[str, Any], ids: dict[str, int], named: dict[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What opens and closes an input: the template in the file, unless the configuration says otherwise."""
    sides: tuple[list[int], list[int]] = ([], [])
    for part in _parts(processor, "processors"):
        if part["type"] == "TemplateProcessing":
            place = 0
            for item in part["single"]:
                if "Sequence" in item:
                    place = 1
                else:
                    sides[place].append(ids[item["SpecialToken"]["id"]])
        elif part["type"] in ("BertProcessing", "RobertaProcessing"):
            sides[0].append(part["cls"][1])
            sides[1].append(part["sep"][1])
    for place, key in enumerate(("bos", "eos")):
        wanted, token = config.get(f"add_{key}_token"), named[key]
        if isinstance(wanted, bool):
            sides[place][:] = [token] if wanted and token is not None else []
    return tuple(sides[0]), tuple(sides[1])


def _token_bytes(source: dict[str, Any], spellings: dict[int, str], added: list[_Added]) -> tuple[bytes, ...]:
    decoders = {part["type"] for part in _parts(source.get("decoder"), "decoders")}
    result = [b""] * (max(spellings) + 1)
    if "ByteLevel" in decoders:
        for number, data in zip(spellings, bytes_of_letters(spellings.values()), strict=True):
            result[number] = data
    elif decoders & {"Metaspace", "ByteFallback", "Replace"}:
        if source["model"].get("byte_fallback"):
            check_byte_tokens(spellings.values())
        for number, token in spellings.items():
            result[number] = bytes_of_marked(token)
    else:
        raise unsupported(f"a tokenizer that decodes with {', '.join(sorted(decoders)) or 'nothing'} is not supported")
    for entry in added:
        result[entry.id] = b"" if entry.control else entry.spelling.encode()
    return tuple(result)
