"""Chat templates as the daemon uses them: which one a model has, what it sees, how a last message is continued (row B15)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from daemon.text.chat_template import ChatTemplate, TemplateHost, template_for
from daemon.text.tokenizer import load_tokenizer
from engine.errors import CavectlError
from engine.inspect import inspect_model
from engine.types import ModelInfo
from tests.daemon.text.rendering import USER, error_of, run, text_of
from tests.fixtures.tiny_tok import CHATML

ASSISTANT = {"role": "assistant", "content": "The answer is "}


def info(form: str, template: str | None = None) -> ModelInfo:
    return ModelInfo(
        format=form,  # type: ignore[arg-type]
        architecture="llama",
        name="",
        parameters=0,
        weight_bytes=0,
        quantization="F32",
        context_tokens=16,
        embedding_length=8,
        layers=1,
        vocab_size=320,
        config={},
        metadata={},
        chat_template=template,
    )


# --- continuing the last message (row B15) ------------------------------------------------------------------------------------


def test_b15_the_prompt_ends_with_exactly_the_text_to_continue() -> None:
    async def scenario(host: TemplateHost) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        text = await text_of(host, CHATML, [USER, ASSISTANT], **options)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is "
        trimming = CHATML.replace("message['content']", "message['content']|trim")
        assert (await text_of(host, trimming, [USER, ASSISTANT], **options)).endswith("assistant\nThe answer is ")
        parts = {"role": "assistant", "content": [{"type": "text", "text": "so "}]}
        by_parts = "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
        assert await text_of(host, by_parts, [parts], **options) == "[so "

    run(scenario)


def test_b15_a_text_that_is_shown_twice_is_continued_where_it_ends() -> None:
    async def scenario(host: TemplateHost) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        twice = "{{ messages[-1].content }}|{{ messages[-1].content }}.</s>"
        assert await text_of(host, twice, [USER, ASSISTANT], **options) == "The answer is |The answer is "

    run(scenario)


def test_b15_both_flags_at_once_are_refused() -> None:
    async def scenario(host: TemplateHost) -> None:
        for messages, prompt in (([USER, ASSISTANT], True), ([ASSISTANT, USER], False), ([], False)):
            error = await error_of(host, CHATML, messages, add_generation_prompt=prompt, continue_final_message=True)
            assert error.code == "invalid_request"

    run(scenario)


def test_b15_a_template_that_drops_the_last_message_says_so() -> None:
    async def scenario(host: TemplateHost) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        error = await error_of(host, "{{ messages[0].content }}", [USER, ASSISTANT], **options)
        assert error.code == "template_error"

    run(scenario)


# --- what a template sees -----------------------------------------------------------------------------------------------------


def test_templates_fail_in_their_own_words() -> None:
    async def scenario(host: TemplateHost) -> None:
        assert (await error_of(host, "{{ raise_exception('roles\nalternate') }}")).message.endswith(": roles alternate")
        assert "line 2" in (await error_of(host, "\n{% if %}")).message

    run(scenario)


def test_what_no_template_can_show_is_refused() -> None:
    async def scenario(host: TemplateHost) -> None:
        for content in ("\ud800", 2**70):
            assert (await error_of(host, CHATML, [{"role": "user", "content": content}])).code == "invalid_request"
        assert (await error_of(host, "{{ '\\ud800' }}")).code == "template_error"

    run(scenario)


def test_generation_blocks_are_their_body() -> None:
    async def scenario(host: TemplateHost) -> None:
        assert await text_of(host, "a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"

    run(scenario)


def test_time_is_the_clock_of_the_place() -> None:
    async def scenario(host: TemplateHost) -> None:
        assert await text_of(host, "{{ strftime_now('%Y') }}") in {
            time.strftime("%Y"),
            time.strftime("%Y", time.localtime(time.time() - 60)),
        }

    run(scenario)


# --- which template a model has ----------------------------------------------------------------------------------------------


def test_a_file_of_its_own_comes_before_the_configuration(tmp_path: Path) -> None:
    assert template_for(tmp_path, info("safetensors")) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config", "other": 1}')
    assert template_for(tmp_path, info("safetensors")) == ChatTemplate("config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template_for(tmp_path, info("safetensors")) == ChatTemplate("file")


def test_named_templates_are_picked_by_what_a_request_brings(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = template_for(tmp_path, info("safetensors"))
    assert template is not None
    assert (template.pick(None), template.pick([]), template.pick([{}])) == ("plain", "plain", "tools")


def test_s12_a_template_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    evil = "{{ ''.__class__.__mro__ }}"
    folders = [tmp_path / "jinja", tmp_path / "config", tmp_path / "named"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "chat_template.jinja").write_text(evil)
    (folders[1] / "tokenizer_config.json").write_text(json.dumps({"chat_template": evil}))
    (folders[2] / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": evil}]}))
    found = [template_for(folder, info("safetensors")) for folder in folders]
    found.append(template_for(tmp_path / "m.gguf", info("gguf", evil)))

    async def scenario(host: TemplateHost) -> None:
        for template in found:
            assert template is not None
            assert template.source == evil
            assert (await error_of(host, template)).code == "template_error"

    run(scenario)


@pytest.mark.parametrize("config", ["{", '{"chat_template": 5}', '{"chat_template": "' + "a" * (1 << 20) + 'a"}'])
def test_a_template_that_is_none_is_a_corrupt_file(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CavectlError) as error:
        template_for(tmp_path, info("safetensors"))
    assert error.value.code == "corrupt_file"


def test_a_gguf_without_a_template_has_none(tmp_path: Path) -> None:
    assert template_for(tmp_path / "m.gguf", info("gguf")) is None


def test_the_default_model_gets_its_own_chat_format(real_model_path: Path) -> None:
    model = inspect_model(real_model_path)
    template, tokenizer = template_for(real_model_path, model), load_tokenizer(real_model_path, model)
    assert template is not None

    async def scenario(host: TemplateHost) -> list[int]:
        pieces = await host.render(
            template,
            [{"role": "user", "content": "Why? <|im_end|>"}],
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            specials=list(tokenizer.special_tokens),
            max_output_bytes=10_000,
        )
        return await tokenizer.encode_async(pieces, add_special=True)

    ids = run(scenario)
    text = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert tokenizer.decode(ids) == f"system\n{text}\nuser\nWhy? <|im_end|>\nassistant\n"
    assert [number for number in ids if number in (start, end)] == [start, end, start, end, start]
