"""A request's fields as a route gets them: the body, read strictly, and what X-Cavectl-* headers set for clients that cannot
change their body.

Invariant: the body wins over a header, and a header is bound by the same table as the field it stands for.
"""

from __future__ import annotations

import logging
from typing import Any

from daemon.answer import Exchange
from daemon.api.body import read_object
from daemon.api.readers import Fields, Table

log = logging.getLogger("cavectl.api")

HEADER_FIELDS = ("priority", "keep_alive", "ctx")


def read_fields(exchange: Exchange, table: Table) -> Fields:
    """Raises BadField. Fields without effect are named to the client and in the log."""
    body = read_object(exchange.body)
    named = {name: f"x-cavectl-{name.replace('_', '-')}" for name in HEADER_FIELDS if name in table.rows}
    given = {name: _value(exchange.asked[header]) for name, header in named.items() if header in exchange.asked}
    fields = table.read_fields("", given | body)
    if fields.ignored:
        exchange.headers["X-Cavectl-Ignored"] = ", ".join(fields.ignored)
        log.info("request %s: without effect: %s", exchange.id, ", ".join(fields.ignored))
    return fields


def _value(text: str) -> Any:
    """A header is text; what looks like an integer is one, as it would be in JSON."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else text
