"""The command table, and what surrounds every command: finding it, running it, and turning what goes wrong into an exit code.

A command is imported only when it is called: the table holds where it is and the one line that help shows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from cavectl.environment import Environment
from cavectl.exit_codes import ExitCode, exit_code
from cavectl.output import Console, OutputClosed
from engine.errors import CavectlError, InvalidRequest

if TYPE_CHECKING:
    import click


@dataclass(frozen=True, slots=True)
class Entry:
    target: str  # module:function
    summary: str
    hidden: bool = False


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "run": Entry("cavectl.commands.run:run", "Ask a model, or chat with it when no prompt is given."),
        "pull": Entry("cavectl.commands.pull:pull", "Fetch a model."),
        "import": Entry("cavectl.commands.pull:import_model", "Take in a model that is already on this machine."),
        "list": Entry("cavectl.commands.models:list_models", "List the models at hand."),
        "ls": Entry("cavectl.commands.models:list_models", "List the models at hand.", hidden=True),
        "show": Entry("cavectl.commands.models:show", "Show what a model is."),
        "verify": Entry("cavectl.commands.verify:verify", "Hash the files of models again, and compare."),
        "pack": Entry("cavectl.commands.pack:pack", "Make the packed weights of models, so that they load at once."),
        "rm": Entry("cavectl.commands.models:remove", "Remove models."),
        "bench": Entry("cavectl.commands.bench:bench", "Measure how fast a model is here: tokens per second, engine only."),
        "ps": Entry("cavectl.commands.models:loaded", "List the models in memory."),
        "stop": Entry("cavectl.commands.models:stop", "Take a model out of memory."),
        "doctor": Entry("cavectl.commands.doctor:doctor", "Say what this installation has, and what is missing."),
        "serve": Entry("cavectl.commands.daemon:serve", "Run the daemon here, until Ctrl-C."),
        "daemon start": Entry("cavectl.commands.daemon:start", "Start the daemon in the background."),
        "daemon stop": Entry("cavectl.commands.daemon:stop", "Stop the daemon, after the requests in flight."),
        "daemon status": Entry("cavectl.commands.daemon:status", "Say whether the daemon runs, and where."),
        "daemon logs": Entry("cavectl.commands.daemon:logs", "Show the daemon's log."),
    }
)
GROUPS: Mapping[str, str] = MappingProxyType({"daemon": "Start, stop and look at the background process."})
GLOBAL_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--url": "Talk to the daemon at this URL (also: CAVECTL_URL) instead of the local one.",
        "--version": "Print the version.",
        "--help": "Print this, or the help of a command.",
    }
)
_USAGE = "cavectl [--url URL] COMMAND ..."


class Terminated(BaseException):
    """SIGTERM came. Not an Exception: nothing may swallow it on the way out."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every error ends here; a traceback is a defect."""
    signal.signal(signal.SIGTERM, _terminate)
    console = Console.standard()
    try:
        return int(_dispatch(list(arguments), console) or ExitCode.OK)
    except CavectlError as error:
        console.error(error)
        return exit_code(error.code)
    except OutputClosed:
        return ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED


def _terminate(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Terminated


def _dispatch(arguments: list[str], console: Console) -> int | None:
    url, rest = _global_options(arguments)
    if not rest or rest[0] in ("--help", "-h", "help"):
        console.write(help_text())
        return ExitCode.OK if rest else ExitCode.USAGE
    name, rest = _find(rest)
    if name in GROUPS:
        console.write(help_text(name))
        return ExitCode.OK if rest else ExitCode.USAGE
    from cavectl.arguments import run as run_command

    return run_command(command(name), f"cavectl {name}", rest, Environment(console, url))


def _global_options(arguments: list[str]) -> tuple[str, list[str]]:
    url = os.environ.get("CAVECTL_URL", "")
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("--help", "-h"):
        option, equals, value = arguments.pop(0).partition("=")
        if option != "--url":
            raise InvalidRequest(f"no option {option} before the command", hint="cavectl --help")
        if not equals:
            if not arguments:
                raise InvalidRequest("--url needs a value", hint="for example --url http://127.0.0.1:11435")
            value = arguments.pop(0)
        url = value
    return url, arguments


def _find(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of a command or group, and what is left for it. A group comes back when help for it is due."""
    name, *rest = arguments
    if name in GROUPS:
        if not rest or rest[0] in ("--help", "-h"):
            return name, rest
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in COMMANDS:
        return name, rest
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    raise InvalidRequest(f"no command {name!r}", hint=f"did you mean: cavectl {near[0]}" if near else "cavectl --help lists them")


def command(name: str) -> click.Command:
    """A command of the table; imports it."""
    from importlib import import_module

    from cavectl.arguments import command_of

    module, function = COMMANDS[name].target.split(":")
    return command_of(getattr(import_module(module), function))


def help_text(group: str = "") -> str:
    """Help of the whole, or of a group: made from the table, so that no command is imported."""
    prefix = f"{group} " if group else ""
    rows = {n.removeprefix(prefix): e.summary for n, e in COMMANDS.items() if n.startswith(prefix) and not e.hidden}
    if not group:
        rows = {n: s for n, s in rows.items() if " " not in n} | dict(GROUPS)
    lines = [f"Usage: cavectl {group} COMMAND ..." if group else f"Usage: {_USAGE}", ""]
    lines += [GROUPS[group], ""] if group else ["Run language models on this machine.", ""]
    lines += ["Commands:", *(f"  {name:<8}  {summary}" for name, summary in rows.items())]
    if not group:
        lines += ["", "Options:", *(f"  {name:<10}{text}" for name, text in GLOBAL_OPTIONS.items())]
    return "\n".join([*lines, "", f"`cavectl {prefix}COMMAND --help` explains one.", ""])
