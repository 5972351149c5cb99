# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Explain flows: the model's decision, the kernel's entries, the open connections, and the differences."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ..base.addresses import address_and_port, family_of
from ..base.errors import KernelError, PreflightError
from ..cluster.state import ClusterState
from ..convergence.handles import KernelHandles
from ..convergence.live import Flow, LiveConnection, Remembered
from ..convergence.modes.mode import Mode
from ..kernel.rtnetlink.routes import way_to
from ..rendering.rendering import Rendering
from ..rendering.settings import Client
from ..serviceports.info import ServicePortInfo
from .explain import ExplainedFamily, Stages
from .flow import FORWARDED, UNCERTAIN, UNCHANGED, Decision, Origin, arrival_of, decide, origin_of
from .held import OTHER_ENTRIES, Held, Row, why_not_forwarded
from .target import Destination

#: States in which a connection is over; its entry only waits for late packets.
_OVER = ("close", "closed", "time-wait", "time_wait", "last-ack", "last_ack")


class Kernel(NamedTuple):
    """Access to the kernel: its sockets, and the resources of a family with their desired tables."""

    handles: KernelHandles
    stages: Stages


class FlowExplainer:
    """Explains flows on this node. ``kernel``: None to show only the decision of the model."""

    def __init__(
        self, state: ClusterState, families: Sequence[ExplainedFamily], mode: Mode, kernel: Optional[Kernel]
    ) -> None:
        self._state = state
        self._families = {item.context.family: item for item in families}
        self._mode = mode
        self._kernel = kernel
        self._held: dict[str, Held] = {}
        #: Why something could not be read.
        self.problems: list[str] = []

    def document(self, source: str, source_port: int, destination: Destination) -> dict[str, Any]:
        """Return the explanation of a flow between addresses of one family, as plain JSON values."""
        family = self._families.get(family_of(destination.address))
        if family is None:
            name = family_of(destination.address)
            client = Client(source, source_port)
            return _undecided(client, destination, name, ("not served", f"this node does not serve {name}"))
        origin = self._origin(source, source_port, family)
        decision = decide(self._state, family, origin.client, destination)
        found = _decided(origin, decision, destination, family)
        self._add_kernel(found, origin.client, decision, destination, family)
        return found

    def _read(self, what: Callable[[], Any], default: Any) -> Any:
        """Return a value read from the kernel; if it cannot be read, record the reason and return the default."""
        try:
            return what()
        except (KernelError, PreflightError) as error:
            text = str(error)
            if text not in self.problems:
                self.problems.append(text)
            return default

    def _origin(self, source: str, port: int, family: ExplainedFamily) -> Origin:
        way = None
        if self._kernel is not None:
            handles = self._kernel.handles
            way = self._read(lambda: way_to(handles.route, source), None)
        return origin_of(source, port, family.context.settings, way)

    def _add_kernel(
        self,
        found: dict[str, Any],
        client: Client,
        decision: Decision,
        destination: Destination,
        family: ExplainedFamily,
    ) -> None:
        kernel = self._kernel
        if kernel is None:
            return
        context, name = family.context, family.context.family
        arrivals = [arrival_of(decision, destination)]
        port = decision.port
        if port is not None:
            serving = family.tables.rendering.serving(port)
            arrivals = list(serving.places(port, arrivals[0], client, context.settings))
        held = self._held.get(name) or self._read(lambda: Held(family.tables, kernel.stages(family)), None)
        if held is not None:
            self._held[name] = held
            rows = held.rows(name, arrivals)
            found["kernel"] = [row._asdict() for row in rows]
            found["differences"] += held.differences(name, rows, common=port is not None)
            if found["differences"]:
                _judge_kernel(found, rows, decision, family.tables.rendering)
        nothing: list[Any] = []
        for arrival in arrivals:
            flow = Flow(name, client, arrival)
            found["affinity"] += self._read(partial(self._remembered, flow, port, kernel.handles), nothing)
            found["live"] += self._read(partial(self._live, flow, port, kernel.handles), nothing)
        _judge(found, decision)

    def _remembered(self, flow: Flow, port: Optional[ServicePortInfo], handles: KernelHandles) -> list[Remembered]:
        return [] if port is None else self._mode.serving(port).remembered(flow, port, handles)

    def _live(self, flow: Flow, port: Optional[ServicePortInfo], handles: KernelHandles) -> list[LiveConnection]:
        if port is None:
            return self._mode.tracked_connections(flow)
        return self._mode.serving(port).live_connections(flow, port, handles)


_NOTHING: dict[str, Any] = {
    "sourceIs": "",
    "service": "",
    "servicePort": "",
    "via": "",
    "traffic": "",
    "trafficPolicy": "",
    "chosenBy": "",
    "masqueraded": False,
    "masqueradeReason": "",
    "affinitySeconds": 0,
    "sourceRanges": None,
    "endpoints": [],
    "endpoint": "",
    "endpointReason": "",
    "kernel": [],
    "affinity": [],
    "live": [],
    "notes": [],
    "differences": [],
}


def _undecided(client: Client, destination: Destination, family: str, verdict: tuple[str, str]) -> dict[str, Any]:
    """Return a document without the parts about a ServicePort. ``verdict``: with the reason for it."""
    return {
        "source": client.address,
        "sourcePort": client.port,
        "destination": destination.address,
        "port": destination.port,
        "protocol": destination.protocol,
        "family": family,
        "verdict": verdict[0],
        "reason": verdict[1],
        **{key: list(value) if isinstance(value, list) else value for key, value in _NOTHING.items()},
    }


def _decided(origin: Origin, decision: Decision, destination: Destination, family: ExplainedFamily) -> dict[str, Any]:
    """Return the part of a document with the model's decision."""
    verdict = (decision.verdict, decision.reason)
    found = _undecided(origin.client, destination, family.context.family, verdict)
    found["sourceIs"] = origin.reason
    port, frontend = decision.port, decision.frontend
    if port is None or frontend is None:
        return found
    local = port.external_local if frontend.traffic == "external" else port.internal_local
    found.update(
        service=str(port.key.service),
        servicePort=f"{port.key.port_name or port.port} ({port.port}/{port.protocol})",
        via=frontend.via,
        traffic=frontend.traffic,
        trafficPolicy="Local" if local else "Cluster",
        chosenBy=decision.selection_text,
        masqueraded=decision.masquerade.applies,
        masqueradeReason=decision.masquerade.reason,
        affinitySeconds=port.affinity_seconds,
        sourceRanges=None if decision.sources is None else list(decision.sources),
        endpoints=[candidate._asdict() for candidate in decision.candidates],
        endpoint=decision.certain,
        endpointReason=decision.certain_by,
    )
    hairpin = [text for text in decision.chosen if text.rpartition(":")[0].strip("[]") == origin.client.address]
    if hairpin and not decision.masquerade.applies:
        found["notes"].append(f"{hairpin[0]} is the client itself: a connection to it is masqueraded")
    return found


def _judge_kernel(found: dict[str, Any], rows: Sequence[Row], decision: Decision, rendering: Rendering[Any]) -> None:
    """Replace the verdict of the model, which is about desired entries, by what the entries of the kernel do."""
    verdict, reason = UNCERTAIN, f"{OTHER_ENTRIES}; --live shows what happens to a packet"
    certain = why_not_forwarded(rows, decision.chosen, rendering) if decision.verdict == FORWARDED else ""
    if certain:
        verdict, reason = UNCHANGED, certain
    found.update(verdict=verdict, reason=f"{reason} (desired: {decision.verdict})")


def _judge(found: dict[str, Any], decision: Decision) -> None:
    """Compare affinity and open connections with the decision; turn them into plain JSON values."""
    port = decision.port
    remembered: list[Remembered] = found["affinity"]
    live: list[LiveConnection] = found["live"]
    found["affinity"] = [item._asdict() for item in remembered]
    found["live"] = [item._asdict() for item in live]
    if port is None:
        return
    known = {endpoint.text for endpoint in port.endpoints}
    chosen = decision.chosen
    usable = [item.endpoint for item in remembered if item.endpoint in chosen]
    if usable and decision.verdict == FORWARDED:
        found.update(endpoint=usable[0], endpointReason="by the affinity of the client")
    for item in remembered:
        if item.endpoint not in chosen:
            found["notes"].append(f"affinity to {item.endpoint} does not count: it gets no new connections")
    for entry in live:
        over = entry.state.partition(",")[0] in _OVER
        if over or decision.verdict != FORWARDED:
            continue
        what = f"the {entry.by} entry of {entry.source}"
        if entry.endpoint == entry.destination:
            found["differences"].append(f"{what} leads to the address of the Service itself, not to an endpoint")
        elif entry.endpoint not in known:
            found["differences"].append(f"{what} leads to {entry.endpoint}, which is not an endpoint of the Service")
        elif entry.endpoint not in chosen:
            found["notes"].append(f"{what} leads to {entry.endpoint}, which gets no new connections")
        if entry.source == address_and_port(found["source"], found["sourcePort"]):
            found["notes"].append(f"further packets of {entry.source} go to {entry.endpoint}, by the {entry.by} entry")
