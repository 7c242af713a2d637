"""run: one question and its answer, or a chat when there is no prompt and a person sits at both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from cavectl.answer import Answer, Question, stream_answer
from cavectl.arguments import OptionalValue
from cavectl.client import Client
from cavectl.environment import Environment
from cavectl.options import parse_options, set_flag
from cavectl.output import Console
from cavectl.prompt import StdinRule, clean, read_prompt
from cavectl.target import is_path, split_target
from engine.errors import CavectlError, InvalidRequest

StatsForm = Literal["text", "json"]
Words = Annotated[
    list[str],
    typer.Argument(
        default_factory=list,
        show_default=False,
        metavar="MODEL|PROMPT...",
        help="A model, then the prompt; `-` is standard input.",
    ),
]
Options = Annotated[
    list[str],
    typer.Option(
        "-o",
        "--option",
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUE",
        help="A sampling option, such as top_p=0.9.",
    ),
]
Stats = Annotated[
    StatsForm | None,
    typer.Option(click_type=OptionalValue(get_args(StatsForm)), help="Print timings to stderr; --stats=json as JSON."),
]


def run(
    context: typer.Context,
    *,
    words: Words,
    model: Annotated[str, typer.Option("-m", "--model", metavar="NAME", help="The model; all arguments are then the prompt.")] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = "",
    option: Options,
    temperature: Annotated[float | None, typer.Option("--temp", metavar="NUMBER", help="0: always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="NUMBER", help="Makes the answer repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="COUNT", help="Longest answer.")] = None,
    context_tokens: Annotated[
        int, typer.Option("--ctx", min=0, metavar="COUNT", help="Most tokens of prompt and answer; 0: the daemon's setting.")
    ] = 0,
    stats: Stats = None,
    keep_alive: Annotated[str, typer.Option(metavar="TIME", help="How long the model stays in memory: 10m, 0, -1 for ever.")] = "",
    stdin: Annotated[StdinRule, typer.Option(help="Where standard input goes; auto: first, if it is a pipe.")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
) -> None:
    """Ask a model, or chat with it when no prompt is given."""
    environment: Environment = context.obj
    options = parse_options(map(clean, option))
    set_flag(options, "--temp", "temperature", temperature)
    set_flag(options, "--seed", "seed", seed)
    set_flag(options, "--max-tokens", "num_predict", max_tokens)
    if raw and system:
        raise InvalidRequest("--raw sends no system message", hint="write it into the prompt, or leave --raw out")
    target, prompt_words = (model, words) if model else split_target(words, lambda: _names(environment.daemon))
    prompt = read_prompt(prompt_words, stdin, environment.console)
    if prompt is None and not environment.console.stdout_is_terminal:
        raise InvalidRequest("no prompt", hint="give one as arguments or through a pipe; a chat needs a terminal")
    if prompt is not None and not prompt.strip():
        raise InvalidRequest("the prompt is empty", hint="give one as arguments or through a pipe")
    if is_path(target):
        target = str(Path(target).expanduser().absolute())  # so the daemon knows a file that was imported in place
    question = Question(clean(target), clean(system), options, context_tokens, keep_alive)
    if prompt is None:
        _chat(environment, question, verbose=bool(stats))
    else:
        _ask(environment, question, prompt, raw=raw, stats=stats)


def _ask(environment: Environment, question: Question, prompt: str, *, raw: bool, stats: StatsForm | None) -> None:
    client = environment.daemon
    answer = Answer()
    request = question.raw(prompt) if raw else question.chat([{"role": "user", "content": prompt}])
    try:
        stream_answer(client, request, environment.console, answer)
    except CavectlError as error:
        if error.code != "model_not_found" or answer.text:
            raise
        _fetch(environment, client, question.model)
        stream_answer(client, request, environment.console, answer)
    print_remarks(environment.console, client, answer, stats, remedy="--ctx makes it larger")


def _chat(environment: Environment, question: Question, *, verbose: bool) -> None:
    from cavectl.chat import Chat

    client = environment.daemon
    try:
        client.post("/api/show", {"model": question.model})
    except CavectlError as error:
        if error.code != "model_not_found":
            raise
        _fetch(environment, client, question.model)
    Chat(environment, client, question, verbose=verbose).run()


def _fetch(environment: Environment, client: Client, model: str) -> None:
    """Get a model that is not in the store: from its path, which stays where it is, or from where its name says."""
    from cavectl.commands.pull import fetch, take_in

    environment.console.note(f"{model} is not here yet: fetching it")
    if is_path(model):
        take_in(environment, client, Path(model), name="", mode="in-place")
    else:
        fetch(environment, client, model)


def print_remarks(console: Console, client: Client, answer: Answer, stats: StatsForm | None, *, remedy: str) -> None:
    """What a complete answer leaves to say: that the context is full, with its remedy, and the figures asked for."""
    if not answer.was_cut and stats is None:
        return
    from cavectl.stats import context_is_full, loaded_entry, stats_document, stats_lines

    loaded = loaded_entry(client, answer.final.get("model"))
    if answer.was_cut and context_is_full(answer.final, loaded):
        console.note(f"note: the answer ends because the context is full; {remedy}")
    if stats == "json":
        import msgspec

        console.note(msgspec.json.encode(stats_document(answer.final, loaded)).decode())
    if stats == "text":
        console.note("")
        for line in stats_lines(answer.final, loaded):
            console.note(line)


def _names(client: Client) -> list[str]:
    answer: dict[str, Any] = client.get("/api/tags")
    return [m["name"] for m in answer["models"]]
