"""Commands as typer declares them, and one command line made into a call of one.

A command is a function: its signature says what it takes (typer.Option, typer.Argument), its docstring is its help, and its context
has the Environment as object. Completion files and tests read the same declaration. Wrong use is an InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import click
import typer

from cavectl.environment import Environment
from engine.errors import InvalidRequest

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model's name, for example smollm2:135m.")]


class OptionalValue(click.Choice[str]):
    """The values of an option that may stand alone, and then has the first of them. Another one is given as --option=value."""


def command_of(function: Callable[..., int | None]) -> click.Command:
    """The command that a function declares. Its help is plain text, wherever it goes."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(add_help_option=False)(function)
    command = typer.main.get_command(app)
    command.params.append(
        click.Option(["-h", "--help"], is_flag=True, is_eager=True, expose_value=False, callback=_print_help, help="Show help.")
    )
    return command


def run(command: click.Command, title: str, arguments: Sequence[str], environment: Environment) -> int | None:
    """Parse and call; gives what the command gives. What it raises comes through as it is, unlike from click's own `main`."""
    try:
        with command.make_context(title, _with_values(arguments, command), obj=environment) as context:
            return command.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        raise InvalidRequest(_message(error), hint=_hint(error, title)) from None


def _print_help(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.obj.console.line(context.get_help())
        context.exit()


def _with_values(arguments: Sequence[str], command: click.Command) -> list[str]:
    """The arguments with optional values filled in, so that `--stats` never takes the word after it for its value."""
    values = {name: one.type.choices[0] for one in command.params if isinstance(one.type, OptionalValue) for name in one.opts}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [f"{word}={values[word]}" if word in values and place < end else word for place, word in enumerate(arguments)]


def _message(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"no option {error.option_name}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _hint(error: click.UsageError, title: str) -> str:
    if not isinstance(error, click.NoSuchOption):
        return f"{title} --help"
    if error.possibilities:
        return f"did you mean {error.possibilities[0]}?"
    return f"{title} --help; after -- no word is an option"
