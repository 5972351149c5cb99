# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The data of a node about one flow outside its tables: open connections, and the client's affinity."""

from __future__ import annotations

from typing import NamedTuple

from ..base.addresses import address_and_port
from ..rendering.settings import Arrival, Client


class Flow(NamedTuple):
    """The packets from a client that arrive at an address and port."""

    family: str
    client: Client
    arrival: Arrival


class LiveConnection(NamedTuple):
    """A connection of a flow. ``by``: what tracks it. ``endpoint``: who answers, as ``ip:port``.

    ``seen_as``: the source that the endpoint sees. ``state``: of the protocol. ``seconds``: until the entry expires if
    no packet comes, -1 if it does not.
    """

    by: str
    source: str
    destination: str
    endpoint: str
    seen_as: str
    state: str
    seconds: int


class Remembered(NamedTuple):
    """The endpoint to which the affinity of a client leads, and the seconds until it expires."""

    client: str
    endpoint: str
    seconds: int


def tracked(flow: Flow) -> list[LiveConnection]:
    """Return the entries of connection tracking of a flow. Raises KernelError."""
    # Imported late: only explanations need it.
    from ..kernel.conntrack.flows import tracked_flows

    client, arrival = flow.client, flow.arrival
    found = tracked_flows(
        flow.family, arrival.protocol.upper(), (client.address, client.port), (arrival.address, arrival.port)
    )
    return [
        LiveConnection(
            by="conntrack",
            source=address_and_port(*item.source),
            destination=address_and_port(*item.destination),
            endpoint=address_and_port(*item.reply_source),
            seen_as=address_and_port(*item.reply_destination),
            state=item.state,
            seconds=item.seconds,
        )
        for item in found
    ]
