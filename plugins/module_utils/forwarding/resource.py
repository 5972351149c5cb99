# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The listeners of a forwarder as a resource, like the kernel's tables."""

from __future__ import annotations

from typing import Protocol

from ..base.addresses import family_of
from ..rendering.userspace.model import Listener, ListenerKey, listener_line
from ..resources import Change, Kind, Resource


class ListenersTable(Protocol):
    """A holder of listeners: a forwarder, or an object that starts one for the first of them."""

    def table(self) -> dict[ListenerKey, Listener]:
        """Return all listeners."""

    def apply(self, change: Change[ListenerKey, Listener]) -> None:
        """Add, change and remove listeners. Raises KernelError."""


class ListenersResource(Resource[ListenerKey, Listener]):
    """The listeners of a family: address and port of the clients -> endpoints."""

    kind = Kind.LISTENERS

    def __init__(self, listeners: ListenersTable, family: str) -> None:
        self.family = family
        self._listeners = listeners

    def observe(self) -> dict[ListenerKey, Listener]:
        """Return all listeners, including those whose socket cannot be opened now."""
        return {key: item for key, item in self._listeners.table().items() if family_of(key.address) == self.family}

    def apply(self, change: Change[ListenerKey, Listener]) -> None:
        """Add, change and remove listeners. Raises KernelError if the forwarding thread does not answer."""
        self._listeners.apply(change)

    def describe(self, key: ListenerKey, value: Listener) -> list[str]:
        """Return a one-line description."""
        return [listener_line(key, value)]
