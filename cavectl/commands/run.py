"""run: one question and its answer, or a chat when there is no prompt and a person sits at both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from cavectl.answer import Answer, Question, stream_answer
from cavectl.arguments import command, flag, parameter
from cavectl.client import Client
from cavectl.environment import Environment
from cavectl.options import parse_options
from cavectl.prompt import STDIN_RULES, StdinRule, clean, read_prompt
from cavectl.target import is_path, split_target
from engine.errors import CavectlError, InvalidRequest

StatsForm = Literal["", "text", "json"]


@command(
    parameter("words", nargs="*", metavar="MODEL|PROMPT", help="A model, then the prompt; `-` is standard input."),
    parameter("-m", "--model", default="", metavar="NAME", help="The model; all arguments are then the prompt."),
    parameter("--system", default="", metavar="TEXT", help="The system message."),
    parameter("-o", "--option", action="append", metavar="KEY=VALUE", help="A sampling option, such as top_p=0.9."),
    parameter("--temp", dest="temperature", type=float, metavar="NUMBER", help="0 always takes the likeliest token."),
    parameter("--seed", type=int, metavar="NUMBER", help="Makes the answer repeatable."),
    parameter("--max-tokens", type=int, metavar="COUNT", help="Longest answer."),
    parameter("--ctx", dest="context_tokens", type=int, default=0, metavar="COUNT", help="Size of the context."),
    parameter(
        "--stats",
        nargs="?",
        const="text",
        default="",
        choices=("text", "json"),
        help="Print timings to stderr; --stats=json as JSON.",
    ),
    parameter("--keep-alive", default="", metavar="TIME", help="How long the model stays in memory: 10m, 0, -1 for ever."),
    parameter("--stdin", default="auto", choices=STDIN_RULES, help="Where standard input goes; auto: first, if it is a pipe."),
    flag("--raw", help="Send the prompt as it is, without the chat template."),
)
def run(
    environment: Environment,
    *,
    words: list[str],
    model: str,
    system: str,
    option: list[str] | None,
    temperature: float | None,
    seed: int | None,
    max_tokens: int | None,
    context_tokens: int,
    stats: StatsForm,
    keep_alive: str,
    stdin: StdinRule,
    raw: bool,
) -> None:
    """Ask a model, or chat with it when no prompt is given."""
    options = parse_options(map(clean, option or []))
    options |= {k: v for k, v in (("temperature", temperature), ("seed", seed), ("num_predict", max_tokens)) if v is not None}
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


def _ask(environment: Environment, question: Question, prompt: str, *, raw: bool, stats: StatsForm) -> None:
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
    if answer.was_cut and "num_predict" not in question.options:
        environment.console.note("note: the answer ends because the context is full; --ctx makes it larger")
    print_stats(environment, client, question.model, answer, stats)


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
