"""pack: make the packed weights of models ahead of their first load.

Pull and import do it by themselves; this is for what came before, or when there was no space. A child process packs
(engine/pack.py), the store says where. No daemon is needed: a packed file is replaced in one rename, and who has the old one
mapped keeps it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from cavectl.arguments import Json
from cavectl.environment import Environment
from cavectl.exit_codes import ExitCode, exit_code
from cavectl.output import size
from cavectl.target import model_name
from engine.errors import CavectlError, InvalidRequest


def pack(
    context: typer.Context,
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")],
    json: Json = False,
) -> ExitCode:
    """Make the packed weights of models, so that they load at once.

    Pull and import do this by themselves. What is packed already and fresh is left as it is.
    """
    from daemon.store import Store

    environment: Environment = context.obj
    if environment.url:
        raise InvalidRequest("models are packed on this machine only", hint="leave --url out")
    store = Store(environment.settings.data_dir)
    worst, answers = ExitCode.OK, list[dict[str, Any]]()
    for name in [model_name(model) for model in models]:
        try:
            record, report = asyncio.run(store.pack(name))
        except CavectlError as error:
            environment.console.error(error)
            worst = max(worst, exit_code(error.code))
            answers.append({"model": name, "error": error.message, "code": error.code, "hint": error.hint})
            continue
        facts = {"made": report.made, "source_bytes": report.source_bytes, "packed_bytes": report.packed_bytes}
        answers.append({"model": record.name, **facts, "pack_ms": report.pack_ms, "notes": report.notes})
        done = f"packed in {report.pack_ms / 1e3:.1f} s" if report.made else "packed already"
        environment.console.note(f"{record.name}: {size(report.source_bytes)}, {done}: {size(report.packed_bytes)}")
        for note in report.notes:
            environment.console.note(f"{record.name}: {note}")
    if json:
        environment.console.document({"models": answers})
    return worst
