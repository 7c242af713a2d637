"""run: one question and its answer, or a chat when there is no prompt and a person sits at both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cavectl.answer import Answer, Question, stream_answer
from cavectl.client import Client
from cavectl.environment import Environment
from cavectl.options import parse_options
from cavectl.prompt import StdinRule, clean, read_prompt
from cavectl.target import is_path, split_target
from engine.errors import CavectlError, InvalidRequest

StatsForm = Literal["", "text", "json"]


def _option(*names: str, value: str, text: str, **bounds: int) -> Any:
    """An option without a default of its own."""
    return typer.Option(*names, metavar=value, help=text, show_default=False, **bounds)  # type: ignore[arg-type]


_WORDS = typer.Argument(metavar="MODEL|PROMPT", help="A model, then the prompt; `-` is standard input.", show_default=False)


def run(
    context: typer.Context,
    *,
    words: Annotated[list[str] | None, _WORDS] = None,
    model: Annotated[str, _option("--model", "-m", value="NAME", text="The model; all arguments are then the prompt.")] = "",
    system: Annotated[str, _option("--system", value="TEXT", text="The system message.")] = "",
    option: Annotated[
        list[str] | None, _option("--option", "-o", value="KEY=VALUE", text="A sampling option, such as top_p=0.9.")
    ] = None,
    temperature: Annotated[float | None, _option("--temp", value="NUMBER", text="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, _option("--seed", value="NUMBER", text="Makes the answer repeatable.")] = None,
    max_tokens: Annotated[int | None, _option("--max-tokens", value="COUNT", text="Longest answer.")] = None,
    context_tokens: Annotated[int, _option("--ctx", value="COUNT", text="Size of the context.", min=0)] = 0,
    stats: Annotated[StatsForm, _option("--stats", value="[=json]", text="Print timings to stderr.")] = "",
    keep_alive: Annotated[
        str, _option("--keep-alive", value="TIME", text="How long the model stays in memory: 10m, 0, -1 for ever.")
    ] = "",
    stdin: Annotated[StdinRule, typer.Option(help="Where standard input goes. auto: before the prompt, if it is a pipe.")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
) -> None:
    """Ask a model, or chat with it when no prompt is given."""
    environment: Environment = context.obj
    options = parse_options(option or [])
    options |= {k: v for k, v in (("temperature", temperature), ("seed", seed), ("num_predict", max_tokens)) if v is not None}
    if raw and system:
        raise InvalidRequest("--raw sends no system message", hint="write it into the prompt, or leave --raw out")
    target, prompt_words = (model, list(words or [])) if model else split_target(words or [], lambda: _names(environment.daemon))
    prompt = read_prompt(prompt_words, stdin, environment.console)
    if prompt is None and not environment.console.stdout_is_terminal:
        raise InvalidRequest("no prompt", hint="give one as arguments or through a pipe; a chat needs a terminal")
    if prompt is not None and not prompt.strip():
        raise InvalidRequest("the prompt is empty", hint="give one as arguments or through a pipe")
    question = Question(target, clean(system), options, context_tokens, keep_alive)
    if prompt is None:
        _chat(environment, question, verbose=bool(stats))
    else:
        _ask(environment, question, prompt, raw=raw, stats=stats)


def _ask(environment: Environment, question: Question, prompt: str, *, raw: bool, stats: StatsForm) -> None:
    client = environment.daemon
    _take_in_path(environment, client, question)
    answer = Answer()
    request = question.raw(prompt) if raw else question.chat([{"role": "user", "content": prompt}])
    try:
        stream_answer(client, request, environment.console, answer)
    except CavectlError as error:
        if error.code != "model_not_found" or answer.text:
            raise
        _fetch(environment, client, question.model)
        stream_answer(client, request, environment.console, answer)
    if answer.was_cut and "num_predict" not in question.options:
        environment.console.note("note: the answer ends because the context is full; --ctx makes it larger")
    print_stats(environment, client, question.model, answer, stats)


def _chat(environment: Environment, question: Question, *, verbose: bool) -> None:
    from cavectl.chat import Chat

    client = environment.daemon
    _take_in_path(environment, client, question)
    try:
        client.post("/api/show", {"model": question.model})
    except CavectlError as error:
        if error.code != "model_not_found":
            raise
        _fetch(environment, client, question.model)
    Chat(environment, client, question, verbose=verbose).run()


def _take_in_path(environment: Environment, client: Client, question: Question) -> None:
    """A path stands for the model that importing it gives."""
    if is_path(question.model):
        from cavectl.commands.pull import take_in

        question.model = take_in(environment, client, Path(question.model), mode="in-place")


def _fetch(environment: Environment, client: Client, model: str) -> None:
    from cavectl.commands.pull import fetch

    environment.console.note(f"{model} is not here yet: fetching it")
    fetch(environment, client, model)


def print_stats(environment: Environment, client: Client, model: str, answer: Answer, form: StatsForm) -> None:
    if not form:
        return
    from cavectl.stats import loaded_entry, stats_document, stats_lines

    loaded = loaded_entry(client, str(answer.final.get("model", model)))
    if form == "json":
        import msgspec

        environment.console.note(msgspec.json.encode(stats_document(answer.final, loaded)).decode())
        return
    environment.console.note("")
    for line in stats_lines(answer.final, loaded):
        environment.console.note(line)


def _names(client: Client) -> list[str]:
    answer: dict[str, Any] = client.get("/api/tags")
    return [m["name"] for m in answer["models"]]
