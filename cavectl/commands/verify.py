"""verify: are the files of a model still what was recorded? The daemon hashes them; here it is shown, model by model.

Damage on this disk is exit code 1, whatever hash_mismatch means for a download.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cavectl.arguments import Json
from cavectl.commands.pull import transfer
from cavectl.environment import Environment
from cavectl.exit_codes import ExitCode, exit_code
from cavectl.target import model_name
from engine.errors import CavectlError


def verify(
    context: typer.Context,
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")],
    json: Json = False,
) -> ExitCode:
    """Hash the files of models again, and compare.

    A damaged model is not used until it is pulled again; what is good of it is not fetched again.
    """
    environment: Environment = context.obj
    names = [model_name(model) for model in models]
    worst, answers = ExitCode.OK, list[dict[str, Any]]()
    for name in names:
        try:
            done = transfer(environment, environment.daemon, "/api/verify", {"model": name, "stream": True}, json=False)
        except CavectlError as error:
            environment.console.error(error)
            worst = max(worst, ExitCode.ERROR if error.code == "hash_mismatch" else exit_code(error.code))
            answers.append({"model": name, "error": error.message, "code": error.code, "hint": error.hint})
        else:
            answers.append(done)
            environment.console.note(f"{done.get('model', name)} is whole")
    if json:
        environment.console.document({"models": answers})
    return worst
