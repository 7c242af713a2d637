"""Rendering untrusted templates: the sandbox holds (S12), every render is bounded (S13), a broken one costs only its request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from daemon.api.errors import STATUS
from daemon.text.chat_template import TemplateHost
from tests.daemon.process import ROOT
from tests.daemon.text.rendering import USER, error_of, run, text_of


def pid_of(host: TemplateHost) -> int:
    [helper] = host._free._queue  # type: ignore[attr-defined]
    assert helper.pid is not None
    return helper.pid


# --- S12 ---------------------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}{{ ''['__class__']['__mro__'] }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace(x=1) %}{% set ns._y = 1 %}",
    "{{ dict.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ range.__class__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    r"{{ ''|attr('\x5f\x5fclass\x5f\x5f')|attr('mro') }}",
    "{{ ''|attr('_'~'_class_'~'_')|attr('mro') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__.__init__.__globals__}'|attr('format')(messages) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__.__mro__}'.format][0]('') }}",
    "{{ (['{0.__class__.__mro__}']|map('attr', 'format')|first)('') }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "{{ [messages]|map(attribute='__class__')|first|attr('__mro__') }}",
    "{{ ([1]|map).__class__ }}{{ ([1]|map).gi_frame.f_globals }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__ }}",
    "{{ caller.__globals__.x }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{% from '/etc/passwd' import p %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{% do messages.append(1) %}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os').system('id') }}",
    "{{ range(10**9)|list|length }}",
]


def test_s12_the_sandbox_holds() -> None:
    async def scenario(host: TemplateHost) -> None:
        for template in ESCAPES:
            error = await error_of(host, template)
            assert error.code == "template_error", template
        assert await text_of(host, "{{ messages|length }}") == "1"

    run(scenario)


def test_s12_there_are_no_other_globals() -> None:
    async def scenario(host: TemplateHost) -> None:
        for name in ("cycler", "joiner", "lipsum", "config", "request", "os", "open", "eval"):
            assert await text_of(host, f"{{{{ {name} is defined }}}}") == "False", name
        for name in ("range", "dict", "namespace", "raise_exception", "strftime_now"):
            assert await text_of(host, f"{{{{ {name} is callable }}}}") == "True"

    run(scenario)


# --- S13 ---------------------------------------------------------------------------------------------------------------------

SLOW = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10**(10**9) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
]
LARGE = [
    "{{ 'a' * 10**9 }}",
    "{{ ('a' * 10**8) ~ ('b' * 10**8) ~ ('c' * 10**8) }}",
    "{{ [0] * 10**9 }}",
    "{{ '%0999999999d'|format(1) }}",
    "{{ '{:0999999999d}'.format(1) }}",
    "{{ 'a'|center(999999999) }}",
    "{{ 'a' * 200000 }}",
    "{% for a in range(99999) %}0123456789{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000,
]


async def worst_pause(stop: asyncio.Event) -> float:
    """The longest the event loop kept a ping waiting."""
    worst = 0.0
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - before - 0.005)
    return worst


async def pinged(host: TemplateHost, templates: list[str], messages: list[dict[str, Any]]) -> tuple[list[str], float]:
    stop = asyncio.Event()
    ping = asyncio.create_task(worst_pause(stop))
    codes = [(await error_of(host, template, messages)).code for template in templates]
    stop.set()
    return codes, await ping


@pytest.mark.timing
def test_s13_endless_templates_are_killed_and_the_loop_stays_awake() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        started = time.perf_counter()
        codes, worst = await pinged(host, SLOW, [USER])
        assert codes == ["template_timeout"] * len(SLOW)
        assert time.perf_counter() - started < len(SLOW) * 2
        assert worst < 0.1
        assert await text_of(host, "{{ messages[0].content }}") == "hi"

    run(scenario, timeout_s=1.0)


@pytest.mark.timing
def test_s13_large_templates_are_refused_and_the_loop_stays_awake() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        codes, worst = await pinged(host, LARGE, [USER])
        assert set(codes) <= {"template_error", "template_timeout"}
        assert worst < 0.1
        assert await text_of(host, "{{ messages[0].content }}") == "hi"

    run(scenario)


@pytest.mark.timing
def test_s13_a_message_of_ten_megabytes() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        messages = [{"role": "user", "content": "a<b" * 3_500_000}]
        template = "{{ messages[0].content|replace('a', 'xyz' * 50)|replace('b', messages[0].content) }}"
        codes, worst = await pinged(host, [template], messages)
        assert set(codes) <= {"template_error", "template_timeout"}
        assert worst < 0.1

    run(scenario, timeout_s=1.0)


def test_s13_output_is_capped_to_the_byte() -> None:
    async def scenario(host: TemplateHost) -> None:
        assert await text_of(host, "{{ 'é' * 50 }}", max_output_bytes=100) == "é" * 50
        error = await error_of(host, "{{ 'é' * 50 }}x", max_output_bytes=100)
        assert error.message == "the chat template failed: the template renders more than 100 bytes"

    run(scenario)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "bos_token", "x"])
def test_s13_a_request_sets_only_listed_variables(name: str) -> None:
    async def scenario(host: TemplateHost) -> None:
        error = await error_of(host, "{{ 1 }}", extra={name: True})
        assert (error.code, name in error.message) == ("invalid_request", True)
        assert await text_of(host, "{{ enable_thinking }}", extra={"enable_thinking": False}) == "False"

    run(scenario)


def test_a_helper_killed_in_mid_render_costs_its_request_alone() -> None:
    async def scenario(host: TemplateHost) -> None:
        assert await text_of(host, "{{ 1 }}") == "1"
        pid = pid_of(host)
        failing = asyncio.create_task(error_of(host, SLOW[0]))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert (await failing).code == "template_error"
        assert await text_of(host, "{{ 2 }}") == "2"
        assert pid_of(host) != pid

    run(scenario)


def test_a_helper_killed_between_renders_is_replaced() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        os.kill(pid_of(host), signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert await text_of(host, "{{ 2 }}") == "2"

    run(scenario)


def test_a_cancelled_render_does_not_answer_the_next_one() -> None:
    async def scenario(host: TemplateHost) -> None:
        slow = asyncio.create_task(text_of(host, SLOW[0]))
        await asyncio.sleep(0.3)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert await text_of(host, "{{ 3 }}") == "3"

    run(scenario)


def test_two_renders_run_side_by_side() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        slow = asyncio.create_task(error_of(host, SLOW[0]))
        await asyncio.sleep(0.05)
        assert await text_of(host, "{{ 4 }}") == "4"
        assert not slow.done()
        assert (await slow).code == "template_timeout"

    run(scenario, timeout_s=2.0, helpers=2)


def test_a_helper_ends_with_its_host() -> None:
    pids: list[int] = []

    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        pids.append(pid_of(host))

    run(scenario)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_helper_has_no_environment_and_its_limits() -> None:
    async def scenario(host: TemplateHost) -> None:
        await host.warm()
        status = Path(f"/proc/{pid_of(host)}")
        if status.is_dir():
            names = {entry.partition(b"=")[0] for entry in (status / "environ").read_bytes().split(b"\0") if entry}
            assert names <= {b"LANG", b"LC_ALL", b"TZ", b"LC_CTYPE"}
            limits = (status / "limits").read_text()
            assert f"Max address space         {256 << 20}" in limits
            assert "Max file size             0" in limits

    run(scenario)


def test_a_helper_whose_start_was_cancelled_starts_anew() -> None:
    async def scenario(host: TemplateHost) -> None:
        warming = asyncio.create_task(host.warm())
        await asyncio.sleep(0.02)
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        assert await text_of(host, "{{ 5 }}") == "5"

    run(scenario)


def test_a_helper_that_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("daemon.text.chat_template.WORKER", tmp_path / "missing.py")

    async def scenario(host: TemplateHost) -> None:
        for _ in range(2):
            error = await error_of(host, "{{ 1 }}")
            assert error.message == "the process that renders chat templates does not start" and error.code == "no_process"

    run(scenario)


NO_MORE_PROCESSES = """
import asyncio, os, resource, sys, uvloop
from pathlib import Path
from daemon.store.children import run_child
from daemon.text.chat_template import TemplateHost
from engine.errors import CavectlError
from tests.daemon.text.rendering import Limits, error_of

async def main():
    host = TemplateHost(Limits(), 1)
    print((await error_of(host, "{{ 1 }}")).code)
    try:
        await host.warm()
    except CavectlError as error:
        print(error.code)
    await host.close()
    try:
        await run_child([sys.executable, "-c", ""], cwd=Path("/"), limit_bytes=1)
    except CavectlError as error:
        print(error.code)

uvloop.new_event_loop().close()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.geteuid() == 0:  # the limit does not bind root
    os.setuid(65534)
uvloop.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts otherwise there")
def test_a_machine_without_processes_to_spare_is_said_to_be_that() -> None:
    """A helper, a warm start and any other child: fork fails, as RLIMIT_NPROC or the memory of a machine can make it."""
    ended = subprocess.run([sys.executable, "-c", NO_MORE_PROCESSES], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.split() == ["no_process"] * 3, ended.stderr
    assert STATUS["no_process"] == 503
