"""list, show, rm, ps, stop: what is in the store and what is in memory. The daemon knows it; here it is laid out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from cavectl.arguments import Json, ModelName
from cavectl.environment import Environment
from cavectl.names import remember
from cavectl.output import duration, size
from cavectl.target import model_name
from engine.errors import CavectlError


def list_models(context: typer.Context, *, json: Json = False) -> None:
    """List the models at hand."""
    environment: Environment = context.obj
    answer = environment.daemon.get("/api/tags")
    models = answer["models"]
    if not environment.url:
        remember(environment.settings.data_dir, [m["name"] for m in models])
    if json:
        environment.console.document(answer)
        return
    rows = [(m["name"], _short(m["digest"]), size(m["size"]), _since(m["modified_at"])) for m in models]
    environment.console.table(("NAME", "ID", "SIZE", "MODIFIED"), rows)


def show(context: typer.Context, *, model: ModelName, json: Json = False) -> None:
    """Show what a model is."""
    environment: Environment = context.obj
    name = model_name(model)
    answer = environment.daemon.post("/api/show", {"model": name})
    if json:
        environment.console.document(answer)
        return
    for line in describe(answer):
        environment.console.line(line)


def describe(answer: dict[str, Any]) -> Iterator[str]:
    """The sheet of one model, from what /api/show says."""
    details: dict[str, Any] = answer.get("details", {})
    about: dict[str, Any] = answer.get("model_info", {})
    architecture = str(about.get("general.architecture", details.get("family", "")))
    facts = {
        "architecture": architecture,
        "parameters": details.get("parameter_size", ""),
        "context length": about.get(f"{architecture}.context_length", details.get("context_length", "")),
        "embedding length": about.get(f"{architecture}.embedding_length", details.get("embedding_length", "")),
        "quantization": details.get("quantization_level", ""),
        "format": details.get("format", ""),
        "capabilities": ", ".join(answer.get("capabilities", [])),
        "modified": answer.get("modified_at", ""),
    }
    yield "Model"
    yield from (f"  {name:<18}{value}" for name, value in facts.items() if value not in ("", None))
    for title in ("parameters", "system", "license"):
        text = str(answer.get(title) or "").strip()
        if text:
            yield ""
            yield title.capitalize()
            yield from (f"  {line}" for line in text.splitlines()[:12])


def remove(
    context: typer.Context, *, models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")]
) -> None:
    """Remove models."""
    environment: Environment = context.obj
    names = [model_name(model) for model in models]
    client = environment.daemon
    failure: CavectlError | None = None
    for name in names:
        try:
            client.delete("/api/delete", {"model": name})
        except CavectlError as error:
            if failure:
                environment.console.error(failure)
            failure = error
        else:
            environment.console.note(f"removed {name}")
    if not environment.url:
        remember(environment.settings.data_dir, [m["name"] for m in client.get("/api/tags")["models"]])
    if failure:
        raise failure


def loaded(context: typer.Context, *, json: Json = False) -> None:
    """List the models in memory."""
    environment: Environment = context.obj
    client = environment.running_daemon()
    answer: dict[str, Any] = client.get("/api/ps") if client else {"models": []}
    if client is None:
        environment.console.note("no daemon runs, so nothing is in memory")
    if json:
        environment.console.document(answer)
        return
    rows = [
        (
            m["name"],
            size(m["size"]),
            str(m.get("backend", "")),
            str(m.get("context_length", "")),
            _pages(m.get("pages")),
            str(m.get("requests", "")),
            str(m.get("state", "")),
            _until(m.get("expires_at")),
        )
        for m in answer["models"]
    ]
    environment.console.table(("NAME", "SIZE", "BACKEND", "CONTEXT", "PAGES", "REQUESTS", "STATE", "UNTIL"), rows)


def stop(context: typer.Context, *, model: ModelName) -> None:
    """Take a model out of memory."""
    environment: Environment = context.obj
    name = model_name(model)
    client = environment.running_daemon()
    if client is None:
        environment.console.note("no daemon runs, so nothing is in memory")
        return
    answer = client.post("/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    environment.console.note(f"stopped {name}" if answer.get("was_loaded", True) else f"{name} was not loaded")


def _pages(pages: object) -> str:
    """Of the cache: used by requests, kept for others, and all there are, as in 12+30/512."""
    if not isinstance(pages, dict):
        return ""
    kept = int(pages.get("cached", 0)) + int(pages.get("pinned", 0))
    return f"{pages.get('used', 0)}+{kept}/{pages.get('total', 0)}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _moment(text: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None when it is not one."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _since(text: object) -> str:
    moment = _moment(text)
    return "" if moment is None else f"{duration(time.time() - moment)} ago"


def _until(text: object) -> str:
    """When a model leaves memory. Times a century off stand for "never"."""
    moment = _moment(text)
    if moment is None:
        return ""
    left = moment - time.time()
    if left > 50 * 365 * 86400:
        return "forever"
    return "now" if left <= 0 else f"{duration(left)} from now"
