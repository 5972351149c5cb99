# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of the mode that a node runs in: the only place that compares modes."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional, Sequence

from ...base.errors import ConfigurationError, PreflightError
from ...base.mode_names import AUTO, IPTABLES, IPVS, MODES, NFTABLES, NONE, USERSPACE
from ...kernel.facts import capabilities, supported_families
from ...preflight.check import Intention, preflight
from ...preflight.features import rights_findings
from ...preflight.findings import CONFLICTS, ERROR, FORWARD_DROP, Finding, judge
from ..handles import NO_AGENT, KernelHandles
from ..request import Request
from ..runtime.state_directory import control_socket
from .mode import Mode
from .registry import FILTER_BACKENDS, ipvs_with, localhost_needs_agent, mode_object, with_listeners
from .stages.ipvs_filter_backend import set_resources

#: The modes that ``auto`` tries, in this order; if none is possible, the agent forwards connections itself.
_PREFERRED: tuple[str, ...] = (NFTABLES, IPVS, IPTABLES)
_LAST_RESORT = USERSPACE
_LOCALHOST_NEEDS_AGENT = "nodePortAddresses: node ports on loopback addresses need the agent in nftables mode"


class ChosenMode(NamedTuple):
    """The mode in effect, why it was selected, and warnings."""

    mode: Mode
    reason: str
    warnings: tuple[str, ...] = ()


def mode_named(name: str) -> Mode:
    """Return the mode of that name. Raises ConfigurationError if there is none."""
    if name not in MODES:
        raise ConfigurationError(f"mode: {name!r} is not one of {', '.join(MODES)}")
    return mode_object(name)


def mode_without_node(request: Request) -> Mode:
    """Return the mode that the request names, without examining a node: the filter backend ``auto`` is then iptables.

    Raises ConfigurationError for the mode ``auto``.
    """
    if request.configuration.node_proxy.network_policy.standalone:
        return mode_object(NONE)
    name = request.mode or request.configuration.mode
    if name not in MODES:
        raise ConfigurationError(f"mode: {name!r} cannot be rendered without a node; use one of {', '.join(MODES)}")
    mode = mode_object(name)
    wanted = request.configuration.node_proxy.ipvs_filter_backend
    return ipvs_with(wanted) if mode.filter_backend and wanted in FILTER_BACKENDS else mode


def _with_filter_backend(mode: Mode, request: Request) -> ChosenMode:
    """Return ipvs mode with the filter backend of the configuration, and why; return other modes unchanged.

    Raises PreflightError without the rights to determine it, KernelError.
    """
    if not mode.filter_backend:
        return ChosenMode(mode, "")
    wanted = request.configuration.node_proxy.ipvs_filter_backend
    if wanted in FILTER_BACKENDS:
        return ChosenMode(ipvs_with(wanted), f"filter backend {wanted}: set in the configuration")
    return automatic_filter_backend(_schedulers(mode, request), request.ignore_findings)


def automatic_filter_backend(schedulers: Sequence[str], ignored: Sequence[str] = ()) -> ChosenMode:
    """Return ipvs mode with the filter backend that ``auto`` selects on this node, and why; changes nothing.

    It is the filter backend in use, so that nothing changes by itself, otherwise nftables if the node meets its
    requirements, otherwise iptables. Where the chain FORWARD of iptables drops by default, iptables is preferred: only
    a rule in that chain accepts Service traffic there. ``schedulers``: those in use. ``ignored``: names of findings to
    ignore. Raises PreflightError without the rights to determine it, KernelError.
    """
    judge(rights_findings(capabilities()), ignored)
    serving = _serving_filter_backend()
    if serving is not None:
        return ChosenMode(serving, f"filter backend {serving.filter_backend}: already in use on this node")
    families = supported_families()
    possible: list[Mode] = []
    reasons: list[str] = []
    for preferred in map(ipvs_with, FILTER_BACKENDS):
        findings = _findings(preferred, schedulers)
        lacking = _errors(findings, ignored) or preferred.unsupported_reasons(families)
        overruled = [item for item in findings if item.name == FORWARD_DROP and not preferred.needs.extensions]
        if lacking:
            reasons.append(f"filter backend {preferred.filter_backend} is not possible: {'; '.join(lacking)}")
        elif overruled:
            possible.append(preferred)
            reasons.append(
                f"filter backend {preferred.filter_backend} is not preferred: "
                + "; ".join(item.what for item in overruled)
            )
        else:
            chosen = f"filter backend {preferred.filter_backend}: this node meets its requirements"
            return ChosenMode(preferred, "; ".join([chosen, *reasons]))
    return ChosenMode([*possible, ipvs_with(FILTER_BACKENDS[-1])][0], "; ".join(reasons))


def _serving_filter_backend() -> Optional[Mode]:
    """Return ipvs mode with the filter backend on this node, None without one. Loads nothing. Raises KernelError."""
    families = supported_families()
    with KernelHandles() as handles:
        if handles.has_nftables() and any(handles.ipvs_table(family).exists() for family in families):
            return ipvs_with(NFTABLES)
        if handles.has_ipset() and any(set_resources(handles, family).sets.observe() for family in families):
            return ipvs_with(IPTABLES)
    return None


def _schedulers(mode: Mode, request: Request) -> tuple[str, ...]:
    return tuple(request.configuration._replace(mode=mode.name).effective_schedulers)


def _findings(mode: Mode, schedulers: Sequence[str]) -> list[Finding]:
    """Return what preflight finds on this node for the mode, without changing it."""
    return preflight(Intention(needs=mode.needs, families=supported_families(), schedulers=tuple(schedulers)))


def _errors(findings: Sequence[Finding], ignored: Sequence[str]) -> list[str]:
    """Return what the node lacks according to findings. Conflicts with other programs are ignored."""
    return [
        str(finding) for finding in findings if finding.severity == ERROR and finding.name not in (*ignored, *CONFLICTS)
    ]


def _obstacles(mode: Mode, schedulers: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """Return what this node lacks for the mode, without changing it. Conflicts with other programs are ignored."""
    return _errors(_findings(mode, schedulers), ignored)


def choose_mode(request: Request) -> ChosenMode:
    """Return the mode that the request, or else the configuration, names.

    The mode has listeners beside it if an agent runs and serves something itself. Raises as :func:`_chosen` does.
    """
    chosen = _chosen(request)
    if _may_forward(request):
        return chosen._replace(mode=with_listeners(chosen.mode, request.configuration, request.cluster))
    if localhost_needs_agent(chosen.mode, request.configuration):
        return chosen._replace(warnings=(*chosen.warnings, _LOCALHOST_NEEDS_AGENT))
    return chosen


def _chosen(request: Request) -> ChosenMode:
    """Return the mode that the request, or else the configuration, names.

    ``auto`` selects the first of nftables, ipvs and iptables that this node can run; for nftables the kernel validates
    a table with everything that the mode uses, without keeping it. On a node that can run none of them, the agent
    selects userspace. With a fallback, iptables replaces ipvs on a node that cannot run it, with a warning that says
    why. Where another program serves the Services (``networkPolicy.standalone``), no mode is in effect, whatever is
    named. Raises ConfigurationError for an unknown mode or fallback, PreflightError if ``auto`` finds no mode.
    """
    if request.configuration.node_proxy.network_policy.standalone:
        return ChosenMode(mode_object(NONE), "networkPolicy.standalone: another program serves the Services")
    wanted = request.mode or request.configuration.mode
    if request.fallback not in ("", IPTABLES):
        raise ConfigurationError(f"fallback: {request.fallback!r} is not {IPTABLES}")
    if wanted == AUTO:
        return _automatic(request)
    if wanted not in MODES:
        raise ConfigurationError(f"mode: {wanted!r} is not one of {', '.join((*MODES, AUTO))}")
    asked = "requested" if request.mode else "set in the configuration"
    mode, filter_backend, *_none = _with_filter_backend(mode_named(wanted), request)
    asked = "; ".join(text for text in (asked, filter_backend) if text)
    if mode.needs_agent and not (request.check or request.agent):
        raise PreflightError(f"{NO_AGENT}; run the agent on this node, or use another mode")
    if mode.filter_backend and request.fallback:
        obstacles = _obstacles(mode, _schedulers(mode, request), request.ignore_findings)
        if obstacles:
            fallback = mode_named(request.fallback)
            why = f"fallback from {mode.name}, which this node cannot run: {'; '.join(obstacles)}"
            return ChosenMode(fallback, why, (f"mode {fallback.name} is used: {why}",))
    return ChosenMode(mode, asked, _cautions(mode, request))


def _cautions(mode: Mode, request: Request) -> tuple[str, ...]:
    policies = request.configuration.node_proxy.network_policy.enabled
    return tuple(text for text in (mode.caution, mode.policy_caution if policies else "") if text)


def _may_forward(request: Request) -> bool:
    """Return whether the caller is the agent, or checks a node where one runs."""
    return request.agent or (request.check and os.path.exists(control_socket(request.state_directory)))


def _automatic(request: Request) -> ChosenMode:
    # Otherwise a missing permission of this process would be reported as a missing feature of the kernel.
    judge(rights_findings(capabilities()), request.ignore_findings)
    reasons: list[str] = []
    for preferred in map(mode_object, _PREFERRED):
        mode, filter_backend, *_none = _with_filter_backend(preferred, request)
        obstacles = _obstacles(mode, _schedulers(mode, request), request.ignore_findings) or mode.unsupported_reasons(
            supported_families()
        )
        if not obstacles:
            chosen = f"auto: this node meets the requirements of {mode.name} mode"
            return ChosenMode(mode, "; ".join([chosen, *([filter_backend] if filter_backend else []), *reasons]))
        reasons.append(f"{mode.name} mode is not possible: {'; '.join(obstacles)}")
    why = "; ".join(reasons)
    if not _may_forward(request):
        raise PreflightError(f"auto: {why}; {NO_AGENT}")
    last_resort = mode_object(_LAST_RESORT)
    return ChosenMode(last_resort, f"auto: {why}", _cautions(last_resort, request))
