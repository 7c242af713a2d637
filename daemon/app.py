"""The application behind the server's gate: the daemon's state, its routes, its start and its end.

Everything heavy is imported from here on (the server has opened its sockets before). Owns which path leads where; not what a route
does (daemon/api) nor who may connect or ask (daemon/protocol.py, daemon/security.py). Invariant: no route but those below.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.routing import Route

from daemon import __version__
from daemon.admission import Admission
from daemon.answer import Endpoint, LiveRequests, Work
from daemon.api.errors import Dialect
from daemon.api.native import Native
from daemon.api.ollama import Ollama
from daemon.api.openai import OpenAi
from daemon.config import Settings
from daemon.loaded_model import TextSide
from daemon.metrics import Metrics
from daemon.models import ModelManager
from daemon.store import ModelRecord, Store, StoreSettings, Timeouts
from daemon.text.chat_template import TemplateHost, template_for
from daemon.text.tokenizer import EncoderThreads, load_tokenizer
from engine.errors import CavectlError

log = logging.getLogger("cavectl.app")


@dataclass(frozen=True, slots=True)
class AppState:
    settings: Settings
    store: Store
    models: ModelManager
    templates: TemplateHost
    chores: asyncio.Task[None]
    admission: Admission
    encoders: EncoderThreads
    metrics: Metrics = field(default_factory=Metrics)
    live: LiveRequests = field(default_factory=LiveRequests)


async def startup(settings: Settings) -> AppState:
    store = Store(
        settings.data_dir,
        endpoint=settings.hub_endpoint,
        token=settings.hub_token or None,
        settings=StoreSettings(
            index_url=settings.index_url,
            timeouts=Timeouts(connect_s=settings.connect_timeout_s, read_s=settings.read_timeout_s),
            pack=settings.backend in ("auto", "cpu"),
        ),
    )
    encoders = EncoderThreads()

    def load_text(record: ModelRecord) -> TextSide:
        tokenizer = load_tokenizer(record.weights, record.info, encoders, pre_tokenizer=settings.pre_tokenizer or None)
        return TextSide(tokenizer, template_for(record.weights, record.info))

    templates = TemplateHost(settings)
    return AppState(
        settings=settings,
        store=store,
        models=ModelManager(settings, store, load_text),
        templates=templates,
        chores=asyncio.create_task(_first_chores(templates, store)),
        admission=Admission(settings.max_queue),
        encoders=encoders,
    )


async def _first_chores(templates: TemplateHost, store: Store) -> None:
    """What need not be done before the first request. A chore that fails is tried again by whoever needs it."""
    for chore in (templates.warm, lambda: asyncio.to_thread(store.collect)):
        try:
            await chore()
        except CavectlError as error:
            log.warning("at start: %s", error.message)


def healthy(state: AppState) -> bool:
    """False while a model that was loaded has no worker that works."""
    return state.models.healthy


async def shutdown(state: AppState) -> None:
    """End what still runs: each stream with an error event, each model with its process."""
    state.live.cancel_all(CavectlError("the daemon is shutting down", code="shutting_down"))
    await state.live.wait_empty()
    state.chores.cancel()
    await state.models.shutdown()
    await state.templates.close()
    state.encoders.close()


def build_routes(state: AppState) -> list[Route]:
    native, ollama, openai = Native(state, __version__), Ollama(state), OpenAi(state)
    route = _router(state)
    return [
        route("GET", "/", native.root),
        route("GET", "/metrics", native.metrics),
        route("GET", "/api/version", native.version),
        route("GET", "/api/tags", native.tags),
        route("GET", "/api/ps", native.ps),
        route("POST", "/api/show", native.show),
        route("POST", "/api/pull", native.pull),
        route("POST", "/api/import", native.import_),
        route("POST", "/api/verify", native.verify),
        route("DELETE", "/api/delete", native.delete),
        route("POST", "/api/generate", ollama.generate),
        route("POST", "/api/chat", ollama.chat),
        route("GET", "/v1/models", openai.models),
        route("GET", "/v1/models/{id:path}", openai.model),
        route("POST", "/v1/chat/completions", openai.chat),
        route("POST", "/v1/completions", openai.completions),
        route("DELETE", "/v1/requests/{id}", openai.cancel),
    ]


def _router(state: AppState) -> Callable[[str, str, Work], Route]:
    def route(method: str, path: str, work: Work) -> Route:
        dialect: Dialect = "openai" if path.startswith("/v1/") else "ollama"
        endpoint = Endpoint(work, dialect, state.live, state.settings.ping_interval_s)
        return Route(path, endpoint, methods=[method])

    return route
