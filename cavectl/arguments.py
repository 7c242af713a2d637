"""Commands as functions with declared parameters, parsed by argparse.

A command is a function of the Environment and keyword arguments; `@command(...)` says how each comes from the command line, in the
terms of `ArgumentParser.add_argument`. Help, completion files and tests read the same declaration. Wrong use is an InvalidRequest.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from cavectl.environment import Environment
from engine.errors import InvalidRequest

_HELP = frozenset({"-h", "--help"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option (its names begin with a dash) or one argument."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def is_option(self) -> bool:
        return self.names[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        return "action" not in self.settings or self.settings["action"] == "append"

    @property
    def value_is_optional(self) -> bool:
        return self.settings.get("nargs") == "?"

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.settings.get("choices", ()))

    @property
    def help(self) -> str:
        return self.settings["help"]


def parameter(*names: str, help: str, **settings: Any) -> Parameter:  # noqa: A002
    """As `add_argument` takes it. An option with nargs "?" and `const` takes a value only as --option=value."""
    return Parameter(names, settings | {"help": help})


def flag(*names: str, help: str) -> Parameter:  # noqa: A002
    """An option without a value."""
    return Parameter(names, {"action": "store_true", "help": help})


@dataclass(frozen=True, slots=True)
class Command:
    function: Callable[..., int | None]
    parameters: tuple[Parameter, ...]

    @property
    def summary(self) -> str:
        return (self.function.__doc__ or "").split("\n")[0]

    def run(self, title: str, arguments: Sequence[str], environment: Environment) -> int | None:
        """Parse and call. `--help` prints and gives 0."""
        given = _with_values(arguments, self.parameters)
        if not _HELP.isdisjoint(given[: given.index("--") if "--" in given else None]):
            environment.console.write(self._parser(title).format_help())
            return 0
        return self.function(environment, **vars(self._parser(title).parse_intermixed_args(given)))

    def _parser(self, title: str) -> _Parser:
        parser = _Parser(prog=title, description=self.function.__doc__, allow_abbrev=False, add_help=False)
        for one in self.parameters:
            parser.add_argument(*one.names, **one.settings)
        parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="Print this.")
        return parser


def command(*parameters: Parameter) -> Callable[[Callable[..., int | None]], Command]:
    """Makes a command of a function whose keyword arguments are the parameters' destinations."""
    return lambda function: Command(function, parameters)


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ours: one line, a hint, no exit."""

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(message, hint=self._suggestion(message) or f"{self.prog} --help")

    def _suggestion(self, message: str) -> str:
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(wrong[1], self._option_string_actions, n=1) if wrong else []
        return f"did you mean {near[0]}?" if near else ""


def _with_values(arguments: Sequence[str], parameters: Sequence[Parameter]) -> list[str]:
    """The arguments with optional values filled in, so that `--stats` never takes the word after it for its value."""
    values = {name: one.settings["const"] for one in parameters if one.value_is_optional for name in one.names}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [f"{word}={values[word]}" if word in values and place < end else word for place, word in enumerate(arguments)]
