"""The parts of the comparison with llama.cpp: each measures both sides in turn and gives rows of the table.

A part whose means are missing (no llama-server, no text, a side that fails) gives its rows without figures and with the reason.
Not here: the targets (comparison.py), how a side is run (sides.py, servers.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from engine.bench import comparison, http_load, servers, workloads
from engine.bench.comparison import Row, ratios
from engine.bench.http_load import Address
from engine.bench.sides import NotMeasured, Ours, Theirs, busy_neighbour
from engine.bench.timing import Spread, in_turn, spread

PROMPT_TOKENS, CLIENTS, CLIENT_TOKENS = 128, 8, 64
FIRST_PROMPTS = 2  # of each round
PROMPT_IDS = range(1000, 30000)  # plain words in any vocabulary
TEXT_TOKENS = 4096

Found = tuple[list[Row], dict[str, Any]]
Side = Callable[[int], Mapping[str, float]]  # the figures of one round, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ours: Ours
    theirs: Theirs
    theirs_q4_0: Theirs | None
    llama_server: str | None
    text: Path | None
    rounds: int
    say: Callable[[str], object]

    @property
    def threads(self) -> int:
        return self.ours.threads


@dataclass(slots=True)
class Figures:
    """What a side's rounds gave, by name; a side that failed once is not asked again and says why."""

    values: dict[str, list[float]]
    why: str = ""

    def spread(self, name: str) -> Spread | None:
        return spread(self.values[name]) if self.values.get(name) else None


def collect(sides: Mapping[str, Side], rounds: int, say: Callable[[str], object]) -> dict[str, Figures]:
    """Ask every side once a round, another first each time."""
    figures = {name: Figures({}) for name in sides}
    for number in range(rounds):
        for name in in_turn(tuple(sides), number):
            if figures[name].why:
                continue
            try:
                answer = sides[name](number)
            except (NotMeasured, RuntimeError, OSError) as error:
                figures[name].why = f"{name}: {error}"
                say(figures[name].why)
                continue
            for key, value in answer.items():
                figures[name].values.setdefault(key, []).append(value)
            say(f"round {number + 1} of {rounds}, {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in answer.items()))
    return figures


def row(work: str, ours: Figures, theirs: Figures, name: str, **bounds: Any) -> Row:
    mine, other = ours.values.get(name, []), theirs.values.get(name, [])
    pairs = ratios(mine, other)
    return Row(
        work=work,
        ours=spread(mine) if mine else None,
        theirs=spread(other) if other else None,
        ratio=spread(pairs) if pairs else None,
        why="; ".join(dict.fromkeys(why for why in (ours.why, theirs.why) if why)),
        **bounds,
    )


# --- engine only ------------------------------------------------------------------------------------------------------------------


def speed(plan: Plan) -> Found:
    documents: list[dict[str, Any]] = []

    def ours(number: int) -> dict[str, float]:
        documents.append(plan.ours.speeds(comparison.TESTS, number))
        return {name: result["median"] for name, result in documents[-1]["tests"].items()}

    sides: dict[str, Side] = {"ours": ours, "llama.cpp": lambda number: plan.theirs.speeds(comparison.TESTS, number)}
    if plan.theirs_q4_0:
        q4_0, tests = plan.theirs_q4_0, [target.test for target in comparison.TARGETS if target.against == "q4_0"]
        sides["llama.cpp on Q4_0"] = lambda number: q4_0.speeds(tests, number)
    figures = collect(sides, plan.rounds, plan.say)
    without = Figures({}, "no Q4_0 file was given (--q4-0)")
    others = {"same": figures["llama.cpp"], "q4_0": figures.get("llama.cpp on Q4_0", without)}
    rows = [
        row(target.work, figures["ours"], others[target.against], target.test, least=target.least) for target in comparison.TARGETS
    ]
    return [*rows, *_floor_rows(documents)], {"values": {name: of.values for name, of in figures.items()}, **_seen(documents)}


def _floor_rows(documents: Sequence[dict[str, Any]]) -> list[Row]:
    """Our decodes as a share of what memory allows, at the best bandwidth that any round saw."""
    measured = [document for document in documents if document["floor"]["bandwidth"]]
    if not measured:
        why = documents[0]["floor"]["why"] if documents else "nothing of ours was measured"
        return [Row(work="share of the memory floor", unit="%", of="ours", why=why)]
    rows = []
    for name in measured[0]["floor"]["tests"]:
        best = max(document["floor"]["tests"][name]["tokens_per_s"] for document in measured)
        shares = [document["tests"][name]["median"] / best * 100 for document in measured]
        work = f"{name}, share of the memory floor"
        rows.append(Row(work=work, unit="%", ours=spread(shares), of="ours"))
    return rows


def _seen(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bands = [document["floor"]["bandwidth"] for document in documents if document["floor"]["bandwidth"]]
    if not bands:
        return {}
    best = {name: max(band[name]["most"] for band in bands) for name in ("one_thread", "all_threads")}
    return {"bandwidth": best, "conditions": documents[-1]["conditions"], "floor": documents[-1]["floor"]}


def busy(plan: Plan) -> Found:
    """Decode 128 beside a spinner, as a share of what it is without."""
    test = ("tg128",)

    def share(decode: Callable[[], float]) -> dict[str, float]:
        idle = decode()
        with busy_neighbour():
            beside = decode()
        return {"idle": idle, "beside": beside, "percent": beside / idle * 100}

    figures = collect(
        {
            "ours": lambda number: share(lambda: plan.ours.speeds(test, number)["tests"]["tg128"]["median"]),
            "llama.cpp": lambda number: share(lambda: plan.theirs.speeds(test, number)["tg128"]),
        },
        plan.rounds,
        plan.say,
    )
    found = row("decode beside a busy core", figures["ours"], figures["llama.cpp"], "percent", unit="% of idle")
    found = _with(found, least=comparison.BUSY_LEAST_PERCENT, of="ours")
    return [found], {name: of.values for name, of in figures.items()}


def _with(found: Row, **changes: Any) -> Row:
    from msgspec.structs import replace

    return replace(found, **changes)


# --- over HTTP --------------------------------------------------------------------------------------------------------------------


def prompts(count: int, *names: object) -> list[list[int]]:
    source = workloads.generator("http", *names)
    return [[source.choice(PROMPT_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def serve(address: Address, *names: object) -> dict[str, float]:
    """First tokens one after another, then all clients at once."""
    first = [http_load.ask(address, prompt, 8).first_s for prompt in prompts(FIRST_PROMPTS, *names, "first")]
    crowd = http_load.crowd(address, prompts(CLIENTS, *names, "crowd"), CLIENT_TOKENS)
    return {"first": spread(first).median * 1e3, "crowd": crowd.tokens_per_s, "crowd first": crowd.first_p50_s * 1e3}


def http(plan: Plan) -> Found:
    """Only one server is there at a time: the other's threads would be a busy neighbour."""
    resident: dict[str, Any] = {}
    program = plan.llama_server

    def ours(number: int) -> dict[str, float]:
        with servers.our_home(plan.ours.model, plan.threads) as home, servers.our_server(home) as address:
            http_load.ask(address, prompts(1, number, "warm-up")[0], 4)
            answer = serve(address, number)
            resident["bytes"] = psutil.Process(servers.our_worker_pid(home)).memory_info().rss
            resident["model"] = json.loads(home.run("ps", "--json"))["models"][0]
            return answer

    def theirs(number: int) -> dict[str, float]:
        if program is None:
            raise NotMeasured("no llama-server was given (--llama-server)")
        context_tokens = PROMPT_TOKENS + CLIENT_TOKENS + 64
        with servers.llama_server(program, plan.theirs.model, plan.threads, CLIENTS, context_tokens) as address:
            http_load.ask(address, prompts(1, number, "warm-up")[0], 4)
            return serve(address, number)

    figures = collect({"ours": ours, "llama-server": theirs}, plan.rounds, plan.say)
    mine, other = figures["ours"], figures["llama-server"]
    rows = [
        row("HTTP: first token, 128 in", mine, other, "first", unit="ms", most=comparison.HTTP_FIRST_MOST),
        row("HTTP: 8 clients, 128 in, 64 out", mine, other, "crowd", least=comparison.CROWD_LEAST),
        row("HTTP: 8 clients, first token p50", mine, other, "crowd first", unit="ms", most=comparison.CROWD_FIRST_MOST),
    ]
    return rows, {"values": {name: of.values for name, of in figures.items()}, "resident": resident}


def cold(plan: Plan) -> Found:
    program = plan.llama_server

    def theirs(_: int) -> dict[str, float]:
        if program is None:
            raise NotMeasured("no llama-server was given (--llama-server)")
        return {"s": servers.llama_cold_start_s(program, plan.theirs.model, plan.threads)}

    try:
        with servers.our_home(plan.ours.model, plan.threads) as home:
            sides = {"ours": lambda _: {"s": servers.our_cold_start_s(home)}, "llama-server": theirs}
            figures = collect(sides, plan.rounds, plan.say)
    except RuntimeError as error:
        return [Row(work="cold start to first token", unit="s", most=comparison.COLD_MOST_S, of="ours", why=str(error))], {}
    found = row("cold start to first token", figures["ours"], figures["llama-server"], "s", unit="s")
    return [_with(found, most=comparison.COLD_MOST_S, of="ours")], {name: of.values for name, of in figures.items()}


def memory(plan: Plan) -> Found:
    """Our worker after it has served, against what it maps: packed weights, cache, and some room."""
    work = "worker's resident set, of what it may have"
    try:
        document = plan.ours.speeds(("pp16",), 0)
        with servers.our_home(plan.ours.model, plan.threads) as home, servers.our_server(home) as address:
            http_load.crowd(address, prompts(CLIENTS, "memory"), CLIENT_TOKENS)
            resident = psutil.Process(servers.our_worker_pid(home)).memory_info().rss
            pages = json.loads(home.run("ps", "--json"))["models"][0]["pages"]["total"]
    except (NotMeasured, RuntimeError, OSError, psutil.Error) as error:
        return [Row(work=work, unit="MB", of="ours", why=str(error))], {}
    model = document["conditions"]["model"]
    kv_bytes = pages * model["kv_bytes"] // sum(model["pages"])
    allowed = model["weight_bytes"] + kv_bytes + comparison.MEMORY_ROOM_BYTES
    mb = spread([resident / 1e6])
    found = Row(work=work, unit="MB", ours=mb, of="ours", most=round(allowed / 1e6, 1))
    return [found], {"resident_bytes": resident, "weight_bytes": model["weight_bytes"], "kv_bytes": kv_bytes}


# --- the same answers -------------------------------------------------------------------------------------------------------------


def perplexity(plan: Plan) -> Found:
    works = ("perplexity, ours to float32", "perplexity, ours to llama.cpp", "divergence from float32")
    try:
        if plan.text is None:
            raise NotMeasured("no text was given (--text)")
        with tempfile.TemporaryDirectory(prefix="cavectl-bench-") as folder:
            ids = Path(folder) / "ids.json"
            ids.write_text(json.dumps(plan.theirs.tokenize(plan.text, TEXT_TOKENS)), encoding="utf-8")
            mine, other = plan.ours.perplexity(ids), plan.theirs.perplexity(ids)
    except NotMeasured as error:
        return [Row(work=work, unit="", why=str(error)) for work in works], {}
    ours, theirs, exact = (spread([value]) for value in (mine["perplexity"], other["perplexity"], mine["reference"]))
    shown: dict[str, Any] = {"unit": "", "ours": ours, "decimals": 4}
    rows = [
        Row(work=works[0], **shown, theirs=exact, ratio=_of(ours, exact), most=comparison.PERPLEXITY_MOST_OF_REFERENCE),
        Row(work=works[1], **shown, theirs=theirs, ratio=_of(ours, theirs), most=comparison.PERPLEXITY_MOST_OF_THEIRS),
        Row(work=works[2], unit="nats", ours=spread([mine["divergence"]]), of="ours", most=comparison.DIVERGENCE_MOST),
    ]
    return rows, {"ours": mine, "llama.cpp": other}


def _of(ours: Spread, theirs: Spread) -> Spread:
    return spread([ours.median / theirs.median])


PARTS: Mapping[str, Callable[[Plan], Found]] = MappingProxyType(
    {"speed": speed, "busy": busy, "http": http, "cold": cold, "memory": memory, "perplexity": perplexity}
)
