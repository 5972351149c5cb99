# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that converges a node at boot to its last state, before its agent or kubelet start.

It needs no API server, no network and no Python package. What cannot be restored leaves the node as a fresh one: the
exit status is always 0, so that nothing waits for it in vain, and one line says why.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from typing import Any, Callable, Iterable, Iterator, Sequence

from ..base.errors import HistoryError, KernelError, ProxyError
from ..base.installed import KEPT_OFF_FILE
from ..base.installed import STATE_DIRECTORY as RUNTIME
from ..base.timestamps import timestamp
from ..cluster.api_addresses import claims_at
from ..cluster.files.after_reboot import without_local_pods
from ..cluster.files.static import StaticDirectory
from ..cluster.parsing.objects import object_key, parsed_object
from ..cluster.state import ClusterState
from ..configuration.load import load
from ..convergence.converge import run_convergence
from ..convergence.guard import Guard
from ..convergence.handles import KernelHandles
from ..convergence.modes.choose import mode_named
from ..convergence.removal import policy_removal_stages, superseded_stages
from ..convergence.request import Interfaces, Request
from ..convergence.runtime.ledger import booted_from, forget, has_converged, record_boot
from ..convergence.runtime.lock import ConvergenceLock
from ..convergence.runtime.state_directory import DEFAULT_CACHE
from ..kernel.facts import machine_identity
from ..preflight.cluster_state import is_first
from ..preflight.findings import INCOMPLETE_SNAPSHOT, LOSS, NODE, judge
from ..preflight.processes import possible_proxies, processes, service_proxy_findings
from ..resources import apply_plan, plan
from . import boot_directory, boot_state, units
from .boot_state import BootState

# When this program looks whether kube-proxy has returned, after the boot.
_AGAIN_SECONDS = (60.0, 120.0, 300.0, 600.0, 1800.0)
# An agent has a copy of the cluster state of its own, which is newer, unless it has never followed the cluster.
_AGENT_ENABLED = "/etc/systemd/system/multi-user.target.wants/kubenode-proxy.service"
# They were judged when the state was programmed; now it lacks what was local.
_ACCEPTED = (INCOMPLETE_SNAPSHOT, NODE, LOSS)
_WORKLOADS = ("Service", "EndpointSlice")
_CONVERGED = "this node has converged since it booted"


class _FirstConvergence(Guard):
    """Refuses to restore an older state over that of a run for which this program has waited.

    ``when``: the time of the state.
    """

    def __init__(self, request: Request, handles: KernelHandles, when: str) -> None:
        super().__init__(request, handles)
        self._when = when

    def begin(self) -> list[str]:
        """See the base class. Raises HistoryError."""
        if has_converged(RUNTIME):
            raise HistoryError(_CONVERGED)
        return super().begin()

    def after_change(self, mode: str, filter_backend: str, node_name: str, addresses: Interfaces) -> list[str]:
        """See the base class. Raises KernelError."""
        record_boot(RUNTIME, self._when)
        return []


def first_only(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the objects without all Services but those that everything else depends on: API server and DNS."""
    for item in objects:
        if item["kind"] not in _WORKLOADS or is_first(parsed_object(item, object_key(item))):
            yield item


def request_of(state: BootState, most_seconds: float) -> Request:
    """Return the request that restores a state; of one older than ``most_seconds`` only the first Services.

    Raises ConfigurationError and SnapshotError.
    """
    settings = state.settings
    configuration = load(settings.configuration, settings.mode, settings.node_configuration).configuration
    interfaces = tuple((name, address) for name, address in settings.interfaces)
    objects = without_local_pods(state.objects, settings.node_name, [address for _name, address in interfaces])
    cluster = ClusterState.from_objects(first_only(objects) if state.age > most_seconds else objects)
    cluster.set_api_servers(claims_at((host, port) for host, port in settings.servers))
    cluster.set_static(StaticDirectory(configuration.node_proxy.static_services.directory).read())
    return Request(
        cluster=cluster,
        configuration=configuration,
        node_name=settings.node_name,
        mode=settings.mode,
        ignore_findings=(*settings.ignore_findings, *_ACCEPTED),
        outside_host=settings.outside_host,
        interfaces=interfaces,
        max_unserved_percent=100.0,
    )


def restore_at_boot(max_age: float, variant: str = "", take: str = "") -> list[str]:
    """Converge the node to the state that was kept; return what was done, one line each. Raises ProxyError.

    ``max_age``: in seconds, of a state that is restored whole. ``variant``: of iptables, in which it was restored
    earlier in this boot, empty if not known. ``take``: a cluster state that is to be kept, instead of restoring one.
    """
    if take:
        # Imported late: a boot needs nothing of it.
        from . import boot_handover

        return boot_handover.take(take)
    if os.path.lexists(_AGENT_ENABLED) and os.path.lexists(DEFAULT_CACHE):
        return ["the agent serves this node from its own copy of the cluster state"]
    if booted_from(RUNTIME):
        return yield_to_kube_proxy(variant)
    if has_converged(RUNTIME):
        return [_CONVERGED]
    # The process ends at once, and what it allocates stays until then.
    gc.disable()
    state = boot_state.read(DEFAULT_CACHE)
    if state is None:
        return ["there is no state to restore"]
    if state.settings.machine not in ("", machine_identity()):
        return ["the state is that of another machine, from which the disk was copied"]
    if state.settings.kept_off and not os.path.lexists(KEPT_OFF_FILE):
        return ["kube-proxy has been let return to this node"]
    judge(service_proxy_findings(standalone=not state.settings.mode), state.settings.ignore_findings)
    when = timestamp(state.renewed)
    report = run_convergence(request_of(state, max_age), functools.partial(_FirstConvergence, when=when))
    lines = [
        f"the state of {when} is restored in {report.mode} mode: {report.counts['services']} Services with "
        f"{report.counts['endpoints']} endpoints, without those of pods that ran on this node"
    ]
    if state.age > max_age:
        lines.append("warning: it is too old, so only the API server, DNS and static Services are served")
    warnings = list(report.warnings)
    try:
        boot_directory.discard_unconfirmed()
        if state.settings.mode and not units.why_not_systemd():
            program = [boot_directory.path_of(boot_directory.PROGRAM), f"--max-age={max_age}"]
            program += [f"--variant={report.xtables_variant.name}"] if report.xtables_variant else []
            # A migration that is reverted removes the program, and not this timer.
            command = ["/bin/sh", "-c", 'test ! -e "$4" || exec "$@"', "sh", sys.executable, "-I", "-B", *program]
            first, *more = _AGAIN_SECONDS
            units.start_timer(boot_directory.AGAIN, first, "Look whether kube-proxy has returned", command, *more)
    except ProxyError as error:
        warnings.append(str(error))
    return lines + [f"warning: {warning}" for warning in warnings]


def yield_to_kube_proxy(variant: str) -> list[str]:
    """Remove what was restored, and the state, if kube-proxy serves this node by now; return what was done.

    While the node boots it cannot run, since kubelet starts it. An older state must not serve beside it. Raises
    ProxyError.
    """
    state = boot_state.read()
    ignored = state.settings.ignore_findings if state is not None else ()
    found = [finding for finding in possible_proxies(processes()) if finding.name not in ignored]
    if not found or state is None or not state.settings.mode:
        return []
    with ConvergenceLock(RUNTIME, boot_directory.LOCK_SECONDS), KernelHandles() as handles:
        if not booted_from(RUNTIME):
            return [_CONVERGED]
        try:
            stages = superseded_stages(mode_named(state.settings.mode), handles, variant)
            planned = plan([*stages, *policy_removal_stages(handles)])
        except KernelError as error:
            return [f"{found[0].what}, and what was restored stays until it serves: {error}"]
        apply_plan(planned)
        boot_directory.forget()
        forget(RUNTIME)
    return [f"{found[0].what}: what was restored at boot is removed, and will not be restored again"]


def main(argv: Sequence[str], restore: Callable[..., list[str]] = restore_at_boot) -> int:
    """Restore the state that was kept, and say so, or why not; the exit status is 0 in any case."""
    parser = argparse.ArgumentParser(description="Converge a node to its last state when it boots.")
    parser.add_argument("--max-age", type=float, required=True, help="in seconds, of a state that is restored whole")
    parser.add_argument("--variant", default="", help="of iptables, in which it was restored earlier in this boot")
    parser.add_argument(
        "--take", default="", metavar="FILE", help="keep a cluster state that an agent or a run has left"
    )
    try:
        lines = restore(**vars(parser.parse_args(list(argv))))
    except Exception as error:
        # Whatever it is: kubelet and the rest of the boot wait for this program.
        what = "the state is not restored, or only in part" if isinstance(error, KernelError) else "nothing is restored"
        lines = [f"{what}: {error if isinstance(error, ProxyError) else repr(error)}"]
    sys.stdout.write("".join(f"kubenode-proxy: {line}\n" for line in lines))
    return 0
