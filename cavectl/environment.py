"""What a command is given to work with: the console, the settings, and a daemon to talk to.

Made once per run by app.py and handed to the command as the context's object, so that a test can give it another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cavectl import __version__
from cavectl.output import Console
from engine.errors import CavectlError

if TYPE_CHECKING:
    from cavectl.client import Client
    from daemon.config import Settings


@dataclass
class Environment:
    console: Console = field(default_factory=Console.standard)
    url: str = ""  # "": the local daemon, over its Unix socket

    @cached_property
    def settings(self) -> Settings:
        from daemon.config import resolve

        return resolve()

    @cached_property
    def client(self) -> Client:
        """The daemon as it is: nothing is started and no version is compared."""
        from cavectl.client import Client

        if self.url:
            return Client(url=self.url, api_key=self.settings.api_key)
        return Client(socket_path=str(self.settings.socket))

    @cached_property
    def daemon(self) -> Client:
        """A daemon of our version, started if none runs. One at a URL is never started from here."""
        if not self.url:
            from cavectl.launch import ensure_daemon

            ensure_daemon(self.client, self.settings, self.console)
        check_version(self.client.get("/api/version"), self.client.place)
        return self.client

    def running_daemon(self) -> Client | None:
        """The daemon if one runs."""
        from cavectl.launch import answers

        if not self.url and not answers(self.client):
            return None
        return self.daemon


def check_version(answer: dict[str, Any], place: str) -> None:
    """Old code must not serve new commands: after an upgrade the daemon is restarted, by the person's word."""
    theirs = answer.get("cavectl")
    if theirs == __version__:
        return
    if theirs is None:
        raise CavectlError(f"what answers at {place} is not a cavectl daemon", hint="check CAVECTL_URL", code="daemon_unreachable")
    raise CavectlError(
        f"the daemon is version {theirs}, this command is {__version__}",
        hint="cavectl daemon stop; the next command starts the new one",
        code="daemon_unreachable",
    )
