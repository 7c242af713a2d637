"""HTTP GET as the store does it: whom credentials go to, which redirects are followed, how much is read.

The configured endpoint may be http and private, and so may redirects to its host. Every other redirect must be https to a public
address, resolved once and connected to that very address (behind a proxy of the environment the proxy resolves). The token goes
only to the endpoint's own scheme, host and port. Nothing is decompressed; what is not a file is bounded. Not here: retries
(fetch.py), hub URLs (hub.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import daemon
from engine.errors import CavectlError, ErrorCode

if TYPE_CHECKING:
    import httpx

MAX_JSON_BYTES = 8 << 20
MAX_REDIRECTS = 6
MANY = 1_000_000  # retries: as often as whoever asks cares to
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TOKEN_ALPHABET = re.compile(r"[\x21-\x7e]+")
Resolve = Callable[[str, int], Awaitable[list[str]]]


class FetchError(CavectlError):
    """A request that failed. `retries`: how often it may be tried again at most; `wait_s`: not before."""

    def __init__(self, message: str, code: ErrorCode, *, hint: str = "", retries: int = 0, wait_s: float | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.retries = retries
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`answer_s` bounds one bounded read as a whole; a file is bounded by `read_s` between two pieces."""

    connect_s: float = 3.0
    read_s: float = 30.0
    answer_s: float = 60.0


async def resolve_host(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is of the open internet, and so is the IPv4 address that it may embed."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(ip.packed[-4:])
        if embedded is not None:
            ip = embedded
    return ip.is_global and not ip.is_multicast


class Transport:
    """Requests to one endpoint and to where it redirects. Holds no connection between requests.

    A `token` that is a function is asked for each request, on a thread.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | Callable[[], str] = "",
        timeouts: Timeouts | None = None,
        *,
        resolve: Resolve = resolve_host,
        connection: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._timeouts = timeouts or Timeouts()
        self._resolve = resolve
        self._connection = connection
        self._tls: ssl.SSLContext | None = None

    async def read(self, url: str) -> bytes:
        """A whole answer of at most MAX_JSON_BYTES."""
        try:
            async with asyncio.timeout(self._timeouts.answer_s), self.stream(url) as response:
                parts, size = [], 0
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if size > MAX_JSON_BYTES:
                        raise FetchError(f"the hub's answer is larger than {MAX_JSON_BYTES >> 20} MiB", "network_error")
                    parts.append(chunk)
                return b"".join(parts)
        except TimeoutError:
            raise FetchError("the hub's answer took too long", "network_error", retries=MANY) from None

    @asynccontextmanager
    async def stream(self, url: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[httpx.Response]:
        """The answer (200, 206 or 416) at the end of the redirects, its body unread. FetchError otherwise."""
        import httpx

        target = httpx.URL(url)
        for _ in range(MAX_REDIRECTS):
            async with self._client(target) as client:
                try:
                    request = await self._request(client, target, headers or {})
                    response = await client.send(request, stream=True)
                    try:
                        if response.status_code in _REDIRECTS:
                            target = self._next(target, response.headers.get("location", ""))
                            continue
                        _check_status(response)
                        yield response
                        return
                    finally:
                        await response.aclose()
                except httpx.HTTPError as error:
                    raise _connection_error(error, target.host) from error
        raise FetchError("the hub redirects in a circle", "network_error")

    def _client(self, target: httpx.URL) -> httpx.AsyncClient:
        import httpx

        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        t = self._timeouts
        timeout = httpx.Timeout(t.read_s, connect=t.connect_s)
        if self._connection is not None:
            return httpx.AsyncClient(transport=self._connection, timeout=timeout)
        # A loopback endpoint is meant literally, whatever proxy the environment names.
        return httpx.AsyncClient(verify=self._tls, timeout=timeout, trust_env=not _is_loopback(target.host))

    async def _request(self, client: httpx.AsyncClient, target: httpx.URL, headers: Mapping[str, str]) -> httpx.Request:
        sent = {"User-Agent": f"cavectl/{daemon.__version__}", "Accept-Encoding": "identity", **headers}
        if self._origin(target) == self._origin(self._home()):
            sent |= await self._credentials()
        if target.host == self._home().host:
            return client.build_request("GET", target, headers=sent)
        address = await self._public_address(target)
        if address is None:
            return client.build_request("GET", target, headers=sent)
        sent["Host"] = target.netloc.decode("ascii")
        extensions = {"sni_hostname": target.raw_host.decode("ascii")}
        return client.build_request("GET", target.copy_with(host=address), headers=sent, extensions=extensions)

    async def _credentials(self) -> dict[str, str]:
        token = self._token if isinstance(self._token, str) else await asyncio.to_thread(self._token)
        if not token:
            return {}
        if not _TOKEN_ALPHABET.fullmatch(token):
            raise FetchError("the hub token has characters that no token has", "hub_unauthorized", hint="check HF_TOKEN")
        return {"Authorization": f"Bearer {token}"}

    async def _public_address(self, target: httpx.URL) -> str | None:
        """The address to connect to; None when a proxy resolves the name."""
        refused = FetchError(f"the hub redirects to {target.host}, which is not a public address", "network_error")
        try:
            ipaddress.ip_address(target.host)
            literal = True
        except ValueError:
            literal = False
        if not literal and "https" in urllib.request.getproxies() and not urllib.request.proxy_bypass(target.host):
            return None
        try:
            addresses = [target.host] if literal else await self._resolve(target.host, target.port or 443)
        except OSError as error:
            raise FetchError(f"cannot find the address of {target.host}", "network_error", retries=1) from error
        if not addresses or not all(is_public(address) for address in addresses):
            raise refused
        return addresses[0]

    def _next(self, current: httpx.URL, location: str) -> httpx.URL:
        """Where a redirect leads, if it may lead there."""
        import httpx

        try:
            target = current.join(location)
        except (httpx.InvalidURL, ValueError):
            raise FetchError("the hub redirects to something that is no address", "network_error") from None
        home = self._home()
        at_home = target.host == home.host and (target.scheme == "https" or (target.scheme == home.scheme == current.scheme))
        if not location or not target.host or target.userinfo or not (at_home or target.scheme == "https"):
            raise FetchError(f"the hub redirects to {target.scheme}://{target.host}, which is not followed", "network_error")
        return target

    def _home(self) -> httpx.URL:
        import httpx

        return httpx.URL(self.endpoint)

    def _origin(self, url: httpx.URL) -> tuple[str, str, int | None]:
        return (url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_status(response: httpx.Response) -> None:
    status, reason = response.status_code, response.headers.get("x-error-code", "")
    if status in (200, 206, 416):
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise FetchError("the hub sent a compressed answer that was not asked for", "network_error")
        return
    if status == 404 or reason in ("RepoNotFound", "EntryNotFound", "RevisionNotFound"):
        raise FetchError(
            "the hub has no such model or file", "hub_not_found", hint="check the name; a private one needs a token (HF_TOKEN)"
        )
    if status in (401, 403):
        gated = reason == "GatedRepo"
        hint = "accept its terms on its page, then use a token (HF_TOKEN)" if gated else "set HF_TOKEN to a token that may read it"
        raise FetchError("the hub refuses access to this model", "hub_unauthorized", hint=hint)
    if status == 429:
        wait_s = _retry_after(response.headers.get("retry-after", ""))
        hint = f"wait {wait_s:.0f} s, then pull again" if wait_s else "wait a minute, then pull again"
        raise FetchError("the hub wants fewer requests", "hub_rate_limited", hint=hint, retries=MANY, wait_s=wait_s)
    wait_s = _retry_after(response.headers.get("retry-after", ""))
    raise FetchError(f"the hub answered with status {status}", "network_error", retries=MANY if status >= 500 else 0, wait_s=wait_s)


def _retry_after(value: str) -> float | None:
    """Seconds, from a number or a date; None when it is neither."""
    import time

    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _connection_error(error: httpx.HTTPError, host: str) -> FetchError:
    import httpx

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return FetchError(
            f"no trusted connection to {host}", "network_error", hint="check the clock and the certificates of this machine"
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return FetchError(f"cannot connect to {host}", "network_error", hint="check the network", retries=1)
    if isinstance(error, httpx.TimeoutException):
        return FetchError(f"{host} stopped sending", "network_error", hint="pull again, it goes on where it stopped", retries=MANY)
    return FetchError(
        f"the connection to {host} broke", "network_error", hint="pull again, it goes on where it stopped", retries=MANY
    )
