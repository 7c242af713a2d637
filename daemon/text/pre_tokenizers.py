r"""How a byte-level BPE vocabulary cuts text into words before it merges: the names in `tokenizer.ggml.pre` and what they mean.

Owns: the table from name to split patterns, and the list of patterns that a tokenizer.json may bring. Not here: merging.
Patterns run on a backtracking engine, so only those listed here are ever compiled: none comes from a model file unseen.
Invariant: a name is in the table only if its ids were compared with llama.cpp's (tests/daemon/text/test_pre_tokenizers.py).
A pattern splits what the patterns before it left uncut; both matches and the text between them become pieces. Where a published
pattern uses a case-insensitive group or a case class, the form here is the one that agrees with llama.cpp to the id.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from engine.errors import CavectlError


@dataclass(frozen=True, slots=True)
class WordSplit:
    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say
    byte_level: bool = True  # tokens spell bytes as letters

    def build(self) -> PreTokenizer:
        parts: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.byte_level:
            parts.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return Sequence(parts)


def word_split(name: str, instead: str | None = None) -> WordSplit:
    """`instead` is read in place of a name that is missing or not in the table; else `unsupported_tokenizer` is raised."""
    for names, split in _TABLE:
        if name in names.split():
            return split
    if instead is not None and instead != name:
        return word_split(instead)
    label = f'pre-tokenizer "{name}" is not supported' if name else "the file names no pre-tokenizer (tokenizer.ggml.pre)"
    hint = "use a conversion of the model that names a known one, or name the known one that is the same as its own in the setting "
    raise CavectlError(label, code="unsupported_tokenizer", hint=f"{hint}pre_tokenizer (CAVECTL_PRE_TOKENIZER)")


def names() -> list[str]:
    """Every supported name, for tests and messages."""
    return [name for group, _ in _TABLE for name in group.split()]


def is_known_pattern(pattern: str) -> bool:
    """Whether a pattern of a tokenizer.json may be compiled."""
    return pattern in _PUBLISHED or any(pattern in split.patterns for _, split in _TABLE)


def _letters(ranges: str) -> str:
    """The inside of a character class from ranges of code points in hexadecimal."""
    ends = ((int(first, 16), int(last or first, 16)) for first, _, last in (item.partition("-") for item in ranges.split()))
    return "".join(chr(first) if first == last else f"{chr(first)}-{chr(last)}" for first, last in ends)


def _any(*branches: str) -> str:
    return "|".join(branches)


_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_FOLDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _SPACES)
_LLAMA3 = _any(_ANY_CASE, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, _SPACES)
_QWEN2 = _any(_ANY_CASE, _WORD, r"\p{N}", _SYMBOLS, _LINES, _SPACES)
_QWEN35 = _any(_ANY_CASE, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _SPACES)

# A word is capitals, then small letters; only ASCII letters have a case here, other letters are both.
_HEAD, _CAPITALS, _SMALL = r"[^\r\n\p{L}\p{N}]?", r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = _any(f"{_HEAD}{_CAPITALS}*{_SMALL}+", f"{_HEAD}{_CAPITALS}+{_SMALL}*", r"\p{N}", _SYMBOLS_SLASH, _LINES, _SPACES)
_GPT4O = _any(
    f"{_HEAD}{_CAPITALS}*{_SMALL}+{_ANY_CASE}?",
    f"{_HEAD}{_CAPITALS}+{_SMALL}*{_ANY_CASE}?",
    r"\p{N}{1,3}",
    _SYMBOLS_SLASH,
    _LINES,
    _SPACES,
)

_EAST_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = _any(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _LINES,
    _SPACES,
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have a case, as one family of tokenizers lists them (an older Unicode than today's).
_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 "
    "1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 "
    "213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943 "
)
_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DIGIT_TRIPLE = "[0-9][0-9][0-9]"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_TABLE: tuple[tuple[str, WordSplit], ...] = (
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4",
        WordSplit((_GPT2,)),
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", WordSplit((r"\p{N}", _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        WordSplit((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("glm4 glm5", WordSplit((_LLAMA3,), ignore_merges=True)),
    ("dbrx smaug-bpe chatglm-bpe", WordSplit((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", WordSplit((_QWEN2,))),
    ("qwen35", WordSplit((_QWEN35,))),
    ("ufakzeka", WordSplit((_any(_WORD, r"\p{N}", _SYMBOLS, _LINES, _SPACES),))),
    ("minicpm5", WordSplit((r"\p{N}{1,3}", _any(_ANY_CASE, _WORD, r"\p{N}+", _SYMBOLS, _LINES, _SPACES)), ignore_merges=True)),
    ("laguna", WordSplit((r"[^\n]+|\n+", _QWEN2))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        WordSplit(
            (_any(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]", _SPACES),),
        ),
    ),
    ("seed-coder", WordSplit((_any(_ANY_CASE, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES),))),
    ("tekken", WordSplit((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", WordSplit((_GPT4O,))),
    ("falcon", WordSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _DIGIT_TRIPLE))),
    ("default", WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _DIGIT_TRIPLE))),
    (
        "deepseek-llm",
        WordSplit((r"[\r\n]", rf"\s?[{_letters(_CASED)}]+", _PUNCTUATION, r"\s+\z", _DEEPSEEK_CJK, r"\p{N}+")),
    ),
    ("deepseek-coder", WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", WordSplit((r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK3))),
    ("poro-chat bloom gpt3-finnish", WordSplit((_BLOOM,))),
    ("viking", WordSplit((_BLOOM, r"\p{N}"))),
    ("gemma4", WordSplit((r"[^\n]+|\n+",), byte_level=False)),
)

# Patterns as tokenizer.json files spell them, where that differs from the table's spelling.
_WORD_ONCE, _SYMBOLS_ONCE = r"[^\r\n\p{L}\p{N}]?+\p{L}+", r" ?[^\s\p{L}\p{N}]++[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUBLISHED = frozenset(
    (
        _any(_FOLDED, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, _SPACES),
        _any(_FOLDED, _WORD, r"\p{N}", _SYMBOLS, _LINES, _SPACES),
        _any(_FOLDED, _WORD, r"\p{N}+", _SYMBOLS, _LINES, _SPACES),
        _any(_FOLDED, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _SPACES),
        _any(_FOLDED, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES),
        _any(r"'(?i:[sdmt]|ll|ve|re)", _WORD_ONCE, r"\p{N}", _SYMBOLS_ONCE, r"\s*[\r\n]", _SPACES),
        _any(r"'(?i:[sdmt]|ll|ve|re)", _WORD_ONCE, r"\p{N}{1,3}", _SYMBOLS_ONCE, r"\s*[\r\n]", _SPACES),
        _any(f"{_HEAD}{_UPPER}*{_LOWER}+", f"{_HEAD}{_UPPER}+{_LOWER}*", r"\p{N}", _SYMBOLS_SLASH, _LINES, _SPACES),
        _any(
            f"{_HEAD}{_UPPER}*{_LOWER}+{_FOLDED}?",
            f"{_HEAD}{_UPPER}+{_LOWER}*{_FOLDED}?",
            r"\p{N}{1,3}",
            _SYMBOLS_SLASH,
            _LINES,
            _SPACES,
        ),
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\s+$",
        r"\p{N}+",
        r"\d",
        r" ",
        r"\s+",
    )
)
