"""pull and import: models come into the store.

The daemon does the work; here its events are shown, and Ctrl-C leaves what a later call resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cavectl.client import Client
from cavectl.environment import Environment
from cavectl.names import remember
from cavectl.progress import follow, progress_view
from cavectl.prompt import clean
from cavectl.target import model_name
from engine.errors import CavectlError

Events = Annotated[bool, typer.Option("--json", help="Print the events as JSON, one a line.")]
ImportMode = Literal["auto", "link", "copy", "in-place"]


def pull(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2:135m, or hf.co/OWNER/REPO[:FILE-OR-QUANT].")],
    json: Events = False,
) -> None:
    """Fetch a model.

    What an earlier call had fetched is not fetched again.
    """
    environment: Environment = context.obj
    name = model_name(model)
    fetch(environment, environment.daemon, name, json=json)


def fetch(environment: Environment, client: Client, model: str, *, json: bool = False) -> None:
    """Pull a model, showing how far it is."""
    try:
        transfer(environment, client, "/api/pull", {"model": model, "stream": True}, json=json)
    except KeyboardInterrupt:
        environment.console.note(f"stopped; what was fetched is kept: cavectl pull {model} goes on from there")
        raise


def import_model(
    context: typer.Context,
    *,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .gguf file, or a folder with config.json and safetensors.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="What to call it; otherwise it is called after the path.")] = "",
    mode: Annotated[
        ImportMode,
        typer.Option(help="in-place: leave it where it is; link: share its bytes; auto: in-place for a file, link for a folder."),
    ] = "auto",
    json: Events = False,
) -> None:
    """Take in a model that is already on this machine."""
    environment: Environment = context.obj
    imported = take_in(environment, environment.daemon, path, name, mode, json=json)
    if not json:
        environment.console.note(f"imported as {imported}")


def take_in(environment: Environment, client: Client, path: Path, name: str, mode: ImportMode, *, json: bool = False) -> str:
    """Import a path, showing how far it is; gives the model's full name. `name` "": the daemon makes one from the path."""
    whole = path.expanduser().absolute()
    if not whole.exists():
        raise CavectlError(
            f"no file or folder {path}", hint="give the path of a .gguf file or of a model folder", code="model_not_found"
        )
    body = {"path": clean(str(whole)), "mode": mode, "stream": True} | ({"name": clean(name)} if name else {})
    return str(transfer(environment, client, "/api/import", body, json=json).get("model", name))


def transfer(environment: Environment, client: Client, route: str, body: dict[str, Any], *, json: bool) -> dict[str, Any]:
    """Follow one transfer to its success; gives its last event."""
    with client.stream(route, body) as events:
        if json:
            last = _print_events(environment, events)
        else:
            with progress_view(environment.console) as view:
                last = follow(events, view)
    if last.get("status") != "success":
        raise CavectlError("the transfer ended before it was complete", hint="run the same command again", code="network_error")
    if not environment.url:
        remember(environment.settings.data_dir, [m["name"] for m in client.get("/api/tags")["models"]])
    return last


def _print_events(environment: Environment, events: Any) -> dict[str, Any]:
    import msgspec

    last: dict[str, Any] = {}
    for event in events:
        environment.console.line(msgspec.json.encode(event).decode())
        last = event
    return last
