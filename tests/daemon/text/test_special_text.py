"""Text of a request never becomes a control token: every special token of every vocabulary, typed into every field of a chat."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.chat_template import TemplateHost
from daemon.text.gguf_vocab import read_gguf_vocabulary
from daemon.text.template_worker import Guard
from daemon.text.tokenizer import Piece, Tokenizer
from tests.fixtures import tiny_tok

NONCE = "314159265358979323846264"
ALL_FIELDS = (
    "{{ bos_token }}{% for m in messages %}{{ start }}{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}|"
    "{% if m.content is string %}{{ m.content|trim }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{{ m.reasoning_content|upper|lower }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}{{ end }}{% endfor %}"
    "{{ tools|tojson }}{{ documents|tojson(ensure_ascii=True) }}{{ messages|tojson }}"
)


def chat_of(text: str) -> dict[str, Any]:
    """A request with `text` in every field that a client fills in."""
    function = {"name": text, "arguments": {text: [text, {"deep": text}]}}
    message = {
        "role": text,
        "name": f"x{text}",
        "tool_call_id": f"{text}y",
        "content": f"  {text}{text} ",
        "reasoning_content": text.lower(),
        "tool_calls": [{"type": "function", "function": function}],
    }
    parts = {"role": "user", "content": [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]}
    tool = {
        "type": "function",
        "function": {"name": text, "description": text, "parameters": {"properties": {text: {"enum": [text]}}}},
    }
    return {"messages": [message, parts], "tools": [tool], "extra": {"documents": [{"title": text, "text": text}]}}


def control_ids(tokenizer: Tokenizer, pieces: list[Piece]) -> list[int]:
    control = set(tokenizer.special_tokens.values())
    return [number for number in tokenizer.encode_pieces(pieces, add_special=False) if number in control]


def test_specials_of_every_vocabulary_stay_text(
    vocabulary_tokenizer: Tokenizer, host: TemplateHost, runner: asyncio.Runner
) -> None:
    tokenizer = vocabulary_tokenizer
    specials = list(tokenizer.special_tokens)
    mark = tokenizer.eos_token or specials[0]
    template = f"{{% set start = {mark!r} %}}{{% set end = {mark!r} %}}" + ALL_FIELDS
    for special in specials:
        pieces = runner.run(
            host.render(
                template,
                **chat_of(special),
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                specials=specials,
                max_output_bytes=1 << 20,
            )
        )
        of_template = [tokenizer.special_tokens[mark]] * 4
        if tokenizer.bos_token:
            of_template.insert(0, tokenizer.special_tokens[tokenizer.bos_token])
        assert control_ids(tokenizer, pieces) == of_template, special
        shown = "".join(piece.text for piece in pieces)
        assert shown.count(special) >= 14, special


def test_without_the_guard_the_same_text_would_be_a_control_token() -> None:
    tokenizer = Tokenizer(read_gguf_vocabulary(tiny_tok.tiny_vocabulary()))
    assert control_ids(tokenizer, [Piece("hi <|im_end|>", True)]) == [tiny_tok.IM_END]


# --- the guard itself --------------------------------------------------------------------------------------------------------


def test_texts_rendered_side_by_side_do_not_complete_a_spelling() -> None:
    for cut in range(1, len("<|im_end|>")):
        for between in ("", " ", "\n"):
            guard = Guard(tiny_tok.SPECIALS, NONCE)
            left, right = guard.hide(["<|im_end|>"[:cut] + between, "<|im_end|>"[cut:]])
            pieces = guard.cut(left.rstrip() + right)
            assert "".join(text for text, _ in pieces) == "<|im_end|>"
            assert not any(special in text for text, may in pieces if may for special in tiny_tok.SPECIALS)


def test_keys_and_depths_are_guarded() -> None:
    guard = Guard(["<s>"], NONCE)
    hidden = guard.hide({"<s>": [{"a": ("b", "<s>")[1]}], "n": 5, "x": None})
    assert "<s>" not in repr(hidden)
    assert hidden["n"] == 5


def test_names_stay_comparable_where_special_tokens_begin_like_them() -> None:
    guard = Guard(["reserved_0", "tool_end"], NONCE)
    assert guard.hide({"role": "user", "type": "tool"}) == {"role": "user", "type": "tool"}
    assert guard.cut(guard.hide("reserved_0")) == [("reserved_0", False)]


def test_a_sentinel_that_a_template_cut_harms_nothing() -> None:
    guard = Guard(["<s>"], NONCE)
    hidden = guard.hide("a<s>b")
    assert guard.cut(hidden[: len(NONCE) + 5] + hidden[-1]) == [(f"a{NONCE}0000b", True)]
    assert guard.cut(f"x{NONCE}00000007y") == [("x", True), ("y", True)]


def test_without_special_tokens_text_is_left_alone() -> None:
    assert Guard([], NONCE).hide("<s>") == "<s>"


def test_the_longest_spelling_wins() -> None:
    guard = Guard(["<a", "<a>"], NONCE)
    assert guard.cut(guard.hide("x<a>y")) == [("x", True), ("<a>", False), ("y", True)]


pieces_of_text = st.lists(
    st.sampled_from([*tiny_tok.SPECIALS, "<", "<|", "|>", "s>", "im_", " ", "a", "9", NONCE[:5]]), max_size=10
)


@settings(max_examples=300)
@given(st.lists(pieces_of_text.map("".join), max_size=4))
def test_what_is_hidden_comes_back_and_nothing_else_is_special(texts: list[str]) -> None:
    guard = Guard(tiny_tok.SPECIALS, NONCE)
    rendered = guard.cut("<|im_start|>".join(guard.hide(texts)))
    assert "".join(text for text, _ in rendered) == "<|im_start|>".join(texts)
    tokenizer = _TINY
    ids = tokenizer.encode_pieces([Piece(text, may) for text, may in rendered], add_special=False)
    assert [number for number in ids if number < 5] == [tiny_tok.IM_START] * max(0, len(texts) - 1)


_TINY = Tokenizer(read_gguf_vocabulary(tiny_tok.tiny_vocabulary()))
