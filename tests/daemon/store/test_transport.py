"""Row S03: whom the token goes to, which redirects are followed; and what counts as a public address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from daemon.store import Timeouts
from daemon.store.fetch import Retries
from daemon.store.transport import FetchError, Transport, is_public
from tests.fixtures.fake_hub import FakeHub, Fault

TOKEN = "hf_secret"
SHORT = Timeouts(connect_s=2, read_s=1, answer_s=2)


def read(transport: Transport, path: str = "/x") -> bytes:
    return asyncio.run(transport.read(transport.endpoint + path))


def listener() -> socket.socket:
    """A target that must never be connected to."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    sock.settimeout(0.1)
    return sock


def untouched(sock: socket.socket) -> bool:
    try:
        sock.accept()[0].close()
    except TimeoutError:
        return True
    return False


def test_token_goes_to_the_endpoint_and_not_to_another_port(hub: FakeHub) -> None:
    hub.add("o/r", {"a.gguf": b"x" * 10})
    transport = Transport(hub.endpoint, TOKEN, SHORT)
    commit = hub.repos["o/r"].commit
    assert read(transport, f"/o/r/resolve/{commit}/a.gguf") == b"x" * 10
    seen = [(entry.server, entry.headers.get("Authorization")) for entry in hub.log]
    assert seen == [("hub", f"Bearer {TOKEN}"), ("cdn", None)]


def test_token_survives_a_redirect_on_the_endpoint(hub: FakeHub) -> None:
    hub.faults += [Fault("redirect", "/x", location="/y"), Fault("body", "/y", body=b"ok")]
    assert read(Transport(hub.endpoint, TOKEN, SHORT)) == b"ok"
    assert [entry.headers.get("Authorization") for entry in hub.log] == [f"Bearer {TOKEN}"] * 2


@pytest.mark.parametrize(
    "location",
    [
        "http://localhost:{port}/",  # another name, http
        "http://127.0.0.2:{port}/",
        "https://localhost:{port}/",  # https, but no public address
        "https://127.0.0.2:{port}/",
        "https://[::1]:{port}/",
        "https://[::ffff:127.0.0.1]:{port}/",
        "//localhost:{port}/",
        "http://user:pw@127.0.0.1:{port}/",
        "ftp://127.0.0.1:{port}/",
        "file:///etc/hostname",
        "https://169.254.169.254/latest",
        "http://169.254.169.254/latest",
        "",
        "https://",
        "http://[::1",
    ],
)
def test_redirect_that_is_not_followed(hub: FakeHub, location: str) -> None:
    target = listener()
    hub.faults += [Fault("redirect", "/x", location=location.format(port=target.getsockname()[1]))]
    with target, pytest.raises(FetchError) as caught:
        read(Transport(hub.endpoint, TOKEN, SHORT))
    assert caught.value.code == "network_error" and len(hub.log) == 1


def test_refused_target_is_never_connected_to(hub: FakeHub) -> None:
    with listener() as target:
        hub.faults += [Fault("redirect", "/x", location=f"https://localhost:{target.getsockname()[1]}/")]
        with pytest.raises(FetchError):
            read(Transport(hub.endpoint, TOKEN, SHORT))
        assert untouched(target)


def test_no_tls_and_no_such_host(hub: FakeHub) -> None:
    for endpoint, message in (
        (hub.endpoint.replace("http:", "https:"), "no trusted connection"),
        ("https://nobody.invalid", "cannot connect"),
    ):
        with pytest.raises(FetchError, match=message) as caught:
            read(Transport(endpoint, TOKEN, SHORT))
        assert caught.value.code == "network_error"


def test_redirect_circle(hub: FakeHub) -> None:
    hub.faults += [Fault("redirect", "/x", location="/x", times=99)]
    with pytest.raises(FetchError, match="circle"):
        read(Transport(hub.endpoint, TOKEN, SHORT))
    assert len(hub.log) == 6


def test_realm_on_another_host_is_ignored(hub: FakeHub) -> None:
    with listener() as target:
        realm = f'Bearer realm="http://127.0.0.1:{target.getsockname()[1]}/token", service="a, b", scope="\\"x"'
        hub.faults += [Fault("status", "/x", status=401, headers={"WWW-Authenticate": realm})]
        with pytest.raises(FetchError) as caught:
            read(Transport(hub.endpoint, TOKEN, SHORT))
        assert caught.value.code == "hub_unauthorized" and untouched(target)


class Recorder(httpx.AsyncBaseTransport):
    """Answers by a function; keeps the requests as they would go to the wire."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.requests: list[httpx.Request] = []
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._answer(request)


def redirecting(location: str, body: bytes = b"ok") -> Recorder:
    home = ("hub.example", "10.0.0.5")
    return Recorder(
        lambda r: (
            httpx.Response(302, headers={"location": location})
            if r.url.host in home
            else httpx.Response(200, stream=httpx.ByteStream(body))
        )
    )


def resolver(*addresses: str) -> Any:
    calls: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        calls.append(host)
        return list(addresses)

    resolve.calls = calls  # type: ignore[attr-defined]
    return resolve


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_public_redirect_is_pinned_to_the_address_it_was_resolved_to() -> None:
    recorder, resolve = redirecting("https://cdn.example:8443/blob?sig=1"), resolver("93.184.216.34", "93.184.216.35")
    assert read(Transport("https://hub.example", TOKEN, SHORT, resolve=resolve, connection=recorder)) == b"ok"
    first, second = recorder.requests
    assert first.headers["authorization"] == f"Bearer {TOKEN}" and first.url.host == "hub.example"
    assert str(second.url) == "https://93.184.216.34:8443/blob?sig=1" and second.headers["host"] == "cdn.example:8443"
    assert second.extensions["sni_hostname"] == "cdn.example" and "authorization" not in second.headers
    assert resolve.calls == ["cdn.example"]


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "fd00::1", "64:ff9b::a00:1", "2002:7f00:1::"]
)
def test_name_that_resolves_inwards_is_refused(address: str) -> None:
    recorder = redirecting("https://cdn.example/blob")
    transport = Transport("https://hub.example", TOKEN, SHORT, resolve=resolver("93.184.216.34", address), connection=recorder)
    with pytest.raises(FetchError, match="not a public address"):
        read(transport)
    assert len(recorder.requests) == 1


@pytest.mark.parametrize("location", ["http://hub.example/x", "http://cdn.example/x"])
def test_https_is_never_left(location: str) -> None:
    recorder = redirecting(location)
    with pytest.raises(FetchError, match="not followed"):
        read(Transport("https://hub.example", TOKEN, SHORT, resolve=resolver("93.184.216.34"), connection=recorder))
    assert len(recorder.requests) == 1


def test_private_endpoint_may_redirect_to_its_own_host_and_to_https() -> None:
    recorder = Recorder(
        lambda r: (
            httpx.Response(302, headers={"location": "https://10.0.0.5/y"})
            if r.url.scheme == "http"
            else httpx.Response(200, stream=httpx.ByteStream(b"ok"))
        )
    )
    assert read(Transport("http://10.0.0.5:8080", TOKEN, SHORT, connection=recorder)) == b"ok"
    assert ["authorization" in request.headers for request in recorder.requests] == [True, False]


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "é"])
def test_token_that_would_break_the_header(token: str) -> None:
    recorder = Recorder(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"ok")))
    with pytest.raises(FetchError, match="token"):
        read(Transport("https://hub.example", token, SHORT, connection=recorder))
    assert recorder.requests == []


def test_public_addresses() -> None:
    for address in ("93.184.216.34", "2606:4700::1111", "64:ff9b::5db8:d822", "::ffff:93.184.216.34"):
        assert is_public(address), address
    for address in (
        "0.0.0.0",
        "10.1.1.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.1.1",
        "172.16.0.1",
        "192.168.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ):
        assert not is_public(address), address
        assert not is_public(f"::ffff:{address}"), address
    for address in ("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "64:ff9b::7f00:1", "2002:a00:1::", "x", ""):
        assert not is_public(address), address


def test_retry_after_as_a_date_and_bounded() -> None:
    from datetime import UTC, datetime, timedelta
    from email.utils import format_datetime

    when = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    answers = iter([httpx.Response(429, headers={"retry-after": when})])
    transport = Transport("https://hub.example", "", SHORT, connection=Recorder(lambda _: next(answers)))
    with pytest.raises(FetchError) as caught:
        asyncio.run(Retries().run(lambda: transport.read("https://hub.example/x")))
    assert caught.value.code == "hub_rate_limited" and 3500 < (caught.value.wait_s or 0) < 3700


def test_waits_grow_are_jittered_and_bounded() -> None:
    retries = Retries(limit=4, base_s=1, cap_s=4)
    delays = [[retries.delay_s(failures, None) for _ in range(50)] for failures in (1, 2, 3, 9)]
    for some, ceiling in zip(delays, (1, 2, 4, 4), strict=True):
        assert ceiling / 2 <= min(some) < max(some) <= ceiling
    assert 7 <= retries.delay_s(1, 7) <= 8
