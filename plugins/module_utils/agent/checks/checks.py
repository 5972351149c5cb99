# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Mark endpoints that fail their health checks in the cluster view, and close their connections.

``serviceports.endpoints`` then stops serving them.
"""

from __future__ import annotations

from typing import Callable, Collection, Iterable, Mapping, NamedTuple, Sequence

from ...base.addresses import family_of
from ...cluster.fields import special_use
from ...cluster.model import Failing, NamespacedName, Service
from ...cluster.state import ClusterState
from ...configuration.node_proxy import HealthChecks
from ...convergence.runtime.agent_status import CheckStatus
from ...event_reasons import Reason
from ..api.events import NORMAL, WARNING, service_reference
from ..reports import Reports
from ..services.node import NodeSync
from ..services.proxier import Proxier
from ..source.view import ClusterView
from ..telemetry.log import INFO
from ..telemetry.metric_tables import CHECKS
from ..threads.failures import Steps
from ..threads.supervision import Supervisor
from ..threads.timers import Timers
from ..views import Views
from .attempt import Target
from .prober import Prober, Verdict, VerdictChange


class Checks:
    """The health checks of the node. Only the main thread calls its methods; ``deliver`` puts changes into its inbox.

    The thread of the checks is started with the first Service that requests them.
    """

    def __init__(
        self,
        settings: HealthChecks,
        *,
        deliver: Callable[[VerdictChange], None],
        supervisor: Supervisor,
        reports: Reports,
    ) -> None:
        self.settings = settings
        self._prober = Prober(deliver)
        self._supervisor = supervisor
        self._log, self._limited, self._metrics, self._post = reports
        self._running = False
        self._services: set[NamespacedName] = set()
        #: Why Services are not checked: those that may not be, and those of which not all endpoints are.
        self._denied: dict[NamespacedName, str] = {}
        self._unchecked: dict[NamespacedName, str] = {}
        self._targets: tuple[Target, ...] = ()
        self._addresses_of_target: dict[NamespacedName, Places] = {}
        self._failing: dict[Target, Verdict] = {}
        self._newly_failed: list[tuple[NamespacedName, str, int]] = []
        self._forgotten = False
        reports.metrics.on_scrape(CHECKS, lambda: {"checked": dict(zip((("passing",), ("failing",)), self.count()))})

    def follow(self, view: ClusterView, own_addresses: Callable[[], Collection[str]], everything: bool = False) -> None:
        """Follow changes of the Services in ``view.dirty``, or with ``everything`` of all Services.

        The cost is that of the changed Services, unless one of them is or was checked. Anyone may request a check.
        """
        services = view.state.services
        names = services if everything else view.dirty
        asking = {name for name in names if name in services and services[name].check is not None}
        asking -= self._deny(view, asking, everything)
        known = self._services if everything else self._services.intersection(view.dirty)
        if not asking and not known:
            return
        self._services = (self._services - known) | asking
        chosen = choose(view.state, self._services, self.settings, own_addresses())
        self._report(chosen.unchecked, self._unchecked)
        self._unchecked = chosen.unchecked
        wanted = set(chosen.targets)
        new = wanted.difference(self._targets)
        self._targets = chosen.targets
        self._failing = {target: verdict for target, verdict in self._failing.items() if target in wanted}
        # The target may have been omitted for a moment, unnoticed by the prober, which then delivers no change.
        verdicts = self._prober.verdicts() if new else {}
        self._failing.update({item: verdicts[item] for item in new & verdicts.keys() if not verdicts[item].passing})
        self._addresses_of_target = {
            name: places_of(view.state, name) for name in {target.service for target in wanted}
        }
        if self._forgotten and everything:
            # Any of them may have begun to fail meanwhile.
            self._forgotten = False
            self._newly_failed = [
                (target.service, address, port)
                for target in self._failing
                for address, port in self._addresses_of_target[target.service].get(target, ())
            ]
        self._prober.follow(wanted)
        if wanted and not self._running:
            self._running = True
            self._supervisor.start("checks", self._prober.run, self._prober.interrupt)
        for name in asking | known:
            self._apply(view, name)

    def _deny(self, view: ClusterView, asking: set[NamespacedName], everything: bool) -> set[NamespacedName]:
        """Return the Services that may not be checked, and report the new ones."""
        reasons = {name: not_allowed(view.state.services[name], self.settings) for name in asking}
        denied = {name: reason for name, reason in reasons.items() if reason}
        self._report(denied, self._denied)
        if everything:
            self._denied = {}
        for name in view.dirty:
            self._denied.pop(name, None)
        self._denied.update(denied)
        return set(denied)

    def _report(self, unchecked: Mapping[NamespacedName, str], known: Mapping[NamespacedName, str]) -> None:
        """Log why Services are not checked."""
        for name, reason in unchecked.items():
            if known.get(name) != reason:
                text = "endpoints are not checked"
                self._limited.about("unchecked", name.namespace, text, reason=f"Service {name}: {reason}")

    @property
    def unchecked(self) -> list[str]:
        """A line for each Service whose endpoints are not all checked."""
        return [f"Service {name}: {reason}" for name, reason in sorted({**self._denied, **self._unchecked}.items())]

    def changed(self, view: ClusterView, change: VerdictChange) -> None:
        """Apply the new verdict of a target."""
        target, verdict = change
        name = target.service
        # The Service may have been deleted since :meth:`follow` was last called.
        if target not in self._targets or name not in view.state.services:
            return
        self._metrics.check_changes.labels("passing" if verdict.passing else "failing").inc()
        if verdict.passing:
            self._failing.pop(target, None)
            text, kind, reason = "passes its checks again", NORMAL, Reason.ENDPOINT_PASSING
            words = "an endpoint passes its health checks again"
            self._limited.about("passing", name.namespace, words, INFO, service=name, endpoint=target)
        else:
            self._failing[target] = verdict
            text, kind, reason = _words(verdict, target), WARNING, Reason.ENDPOINT_FAILING
            words = "an endpoint fails its health checks"
            self._limited.about("failing", name.namespace, words, service=name, endpoint=target, reason=verdict.error)
            self._newly_failed += [
                (name, address, port) for address, port in self._addresses_of_target[name].get(target, ())
            ]
            # Connections are ended after a sync, also if :meth:`follow` already knew the verdict.
            view.dirty.add(name)
        about = None if view.state.services[name].static else service_reference(*name)
        self._post(about, kind, reason, "CheckEndpoint", f"Service {name}: endpoint {target} {text}")
        self._apply(view, name)

    def _apply(self, view: ClusterView, name: NamespacedName) -> None:
        reasons = {
            place: _words(self._failing[target], target)
            for target, places in self._addresses_of_target.get(name, {}).items()
            if target in self._failing
            for place in places
        }
        view.dirty |= view.state.set_failing(name, Failing(reasons, self.settings.panic_percent))

    def end_connections(self, view: ClusterView, families: Sequence[Proxier]) -> None:
        """Record that connections to endpoints that have failed since the last call and are not served are to end."""
        fallen, self._newly_failed = self._newly_failed, []
        for name, address, port in fallen:
            proxier = next((item for item in families if item.family == family_of(address)), None)
            if proxier is None:
                continue
            for info in proxier.service_ports(view.state, name) or ():
                for endpoint in info.endpoints:
                    left = endpoint.failed and not endpoint.ready and info.key.protocol == "TCP"
                    if left and endpoint.ip == address and port in (0, endpoint.port):
                        proxier.removed.end(info, endpoint)

    def status(self) -> list[CheckStatus]:
        """Return the results of all checks as plain JSON values."""
        return [
            {
                "service": str(target.service),
                "endpoint": str(target),
                "passing": verdict.passing,
                "checks": verdict.checks,
                "failures": verdict.failures,
                "lastError": verdict.error,
            }
            for target, verdict in sorted(self._prober.verdicts().items())
        ]

    def count(self) -> tuple[int, int]:
        """Return the numbers of passing and of failing targets."""
        failing = len(self._failing)
        return len(self._targets) - failing, failing

    def forget(self) -> None:
        """Forget the targets and their verdicts, so that the next :meth:`follow` of all Services finds them again."""
        self._targets, self._failing, self._addresses_of_target = (), {}, {}
        self._newly_failed = []
        self._forgotten = True

    def stop(self) -> None:
        """Stop the thread."""
        self._prober.stop()


def _words(verdict: Verdict, target: Target) -> str:
    failures = verdict.failures
    return f"failed {failures} of {max(failures, target.check.fall)} checks, last error: {verdict.error}"


Places = dict[Target, set[tuple[str, int]]]


class Chosen(NamedTuple):
    """The targets to check, and the reason for each Service whose endpoints are not all checked."""

    targets: tuple[Target, ...]
    unchecked: dict[NamespacedName, str]


def places_of(state: ClusterState, name: NamespacedName) -> Places:
    """Return a Service's targets with the endpoint's address and port that depend on each; port 0 means all ports.

    Only TCP ports can be checked, unless the check has a separate port.
    """
    service = state.services.get(name)
    found: Places = {}
    if service is None or service.check is None:
        return found
    for item in state.slices_of(name).values():
        for endpoint in item.endpoints:
            if service.check.port:
                target = Target(name, endpoint.address, service.check.port, service.check)
                found.setdefault(target, set()).add((endpoint.address, 0))
                continue
            for port in item.ports:
                if port.protocol == "TCP":
                    target = Target(name, endpoint.address, port.port, service.check)
                    found.setdefault(target, set()).add((endpoint.address, port.port))
    return found


def choose(
    state: ClusterState, names: Iterable[NamespacedName], settings: HealthChecks, own_addresses: Collection[str]
) -> Chosen:
    """Return the targets of these Services: static ones first, then others by name, up to the maximum.

    A Service of the cluster is never checked at loopback, link-local or own addresses of the node: its owner must not
    be able to make the agent connect to what only the node can reach.
    """
    targets: list[Target] = []
    unchecked: dict[NamespacedName, str] = {}
    services = [service for service in map(state.services.get, names) if service is not None]
    for service in sorted(services, key=lambda item: (not item.static, item.key)):
        reason = ""
        wanted = sorted(places_of(state, service.key))
        if not service.static:
            allowed = [item for item in wanted if item.address not in own_addresses and not special_use(item.address)]
            if len(allowed) < len(wanted):
                reason = "endpoints at addresses of this node are not checked"
            wanted = allowed
        room = max(0, settings.most_endpoints - len(targets))
        if len(wanted) > room:
            limit = f"at most {settings.most_endpoints} are"
            reason = f"{len(wanted) - room} of {len(wanted)} endpoints are not checked: {limit}"
        targets += wanted[:room]
        if reason:
            unchecked[service.key] = reason
    return Chosen(tuple(targets), unchecked)


def not_allowed(service: Service, settings: HealthChecks) -> str:
    """Return why a Service may not have its endpoints checked; empty if it may.

    One of the cluster may if its namespace is listed, and not with a CA file.
    """
    if service.static or service.check is None:
        return ""
    if service.namespace not in settings.namespaces:
        return "is not checked: its namespace is not in healthChecks.namespaces"
    return "is not checked: only a static Service may name a CA file" if service.check.ca else ""


RETRY_SECONDS = 30.0


class CheckFollower:
    """Calls the health checks when something changes.

    An exception in them must not end the agent, which serves Services without them, too. After one, all Services are
    followed again, as if none had been checked.
    """

    def __init__(self, checks: Checks, views: Views, sync: NodeSync, *, timers: Timers, steps: Steps) -> None:
        self._checks = checks
        self._views = views
        self._sync = sync
        self._steps = steps
        self._addresses: tuple[tuple[str, str], ...] = ()
        self._retry = timers.add("follow health checks again", lambda: self.follow(everything=True))

    def follow(self, everything: bool = False) -> None:
        """Check the endpoints of changed Services; those of all Services if the node's addresses changed."""
        proxiers, view = self._sync.proxiers, self._views.current
        addresses = proxiers.node_view.addresses if proxiers is not None else ()
        # An endpoint is no longer checked once the node has its address. A new tuple is rare.
        everything = everything or addresses is not self._addresses
        if everything or view.dirty:
            self._addresses = addresses
            self._attempt(
                lambda: self._checks.follow(view, lambda: {address for _interface, address in addresses}, everything)
            )

    def changed(self, change: VerdictChange) -> None:
        """Apply the new verdict of a target."""
        self._attempt(lambda: self._checks.changed(self._views.current, change))

    def end_connections(self) -> None:
        """Close the connections to endpoints that have failed and are no longer served."""
        proxiers, view = self._sync.proxiers, self._views.current
        if proxiers is not None:
            name = "end connections to failed endpoints"
            self._steps.run(name, lambda: self._checks.end_connections(view, proxiers.families))
            self._steps.run(name, self._sync.end_connections)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._steps.run("follow health checks", action):
            self._checks.forget()
            self._retry.start(RETRY_SECONDS)
