# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The listeners of userspace mode for a check: read from the running agent through its control socket."""

from __future__ import annotations

from typing import Any, Mapping

from ...base.addresses import canonical_address, family_of
from ...base.errors import KernelError, PreflightError, errors_as
from ...rendering.userspace.model import Listener, ListenerKey, listener_line
from ...resources import Change, Kind, Resource
from ..handles import NO_AGENT, ListenerAccess
from .agent_client import NoAgent, ask_agent, reading_answer

QUESTION = "listeners"


def listeners_document(table: Mapping[ListenerKey, Listener]) -> list[list[Any]]:
    """Return listeners as plain JSON values."""
    return [
        [*key, value.owner, [list(endpoint) for endpoint in value.endpoints], value.affinity_seconds, value.sources]
        for key, value in table.items()
    ]


def parse_listeners(document: Any) -> dict[ListenerKey, Listener]:
    """Return the listeners of :func:`listeners_document`. Raises KernelError if the document is not one."""
    with reading_answer("its listeners", KernelError):
        return dict(_parse_row(*row) for row in document)


def _parse_row(protocol: Any, address: Any, port: Any, owner: Any, endpoints: Any, affinity: Any, sources: Any) -> Any:
    if canonical_address(str(address)) != address:
        raise ValueError(f"{address!r} is not an address")
    places = tuple((str(ip), int(number)) for ip, number in endpoints)
    value = Listener(str(owner), places, int(affinity), tuple(map(str, sources)))
    return ListenerKey(str(protocol), address, int(port)), value


class AskedListeners(ListenerAccess):
    """The listeners of the agent whose control socket is at ``path``; they can only be read."""

    def __init__(self, path: str) -> None:
        self._path = path

    def resource(self, family: str) -> Resource[Any, Any]:
        """See the base class."""
        return _AskedResource(self._path, family)


class _AskedResource(Resource[ListenerKey, Listener]):
    kind = Kind.LISTENERS

    def __init__(self, path: str, family: str) -> None:
        self._path = path
        self.family = family

    def observe(self) -> dict[ListenerKey, Listener]:
        """Ask the agent. Raises PreflightError if none runs, KernelError."""
        with errors_as(PreflightError, NO_AGENT, NoAgent):
            answer = ask_agent(self._path, {"command": QUESTION})
        found = parse_listeners(answer.get("listeners"))
        return {key: value for key, value in found.items() if family_of(key.address) == self.family}

    def apply(self, change: Change[ListenerKey, Listener]) -> None:
        """Raise PreflightError: only the agent changes its listeners."""
        raise PreflightError(NO_AGENT)

    def describe(self, key: ListenerKey, value: Listener) -> list[str]:
        return [listener_line(key, value)]
