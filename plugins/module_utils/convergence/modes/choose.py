# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of the mode that a node runs in: the only place that maps a name to a Mode object."""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

from ...configuration.model import MODES
from ...errors import ConfigurationError, PreflightError
from ...kernel.facts import supported_families
from ...preflight.check import Intention, preflight
from ...preflight.features import capabilities, rights_findings
from ...preflight.findings import CONFLICTS, ERROR, judge
from ..handles import NO_AGENT, KernelHandles
from ..request import Request
from ..runtime.state_directory import control_socket
from ..stages.ipvs import set_resources
from .iptables import IPTABLES_MODE
from .ipvs_iptables import IPVS_MODE
from .ipvs_nftables import IPVS_WITH_NFTABLES
from .mode import Mode
from .nftables import NFTABLES_MODE
from .none import NO_MODE
from .userspace import USERSPACE_MODE

AUTO = "auto"


_MODES: Dict[str, Mode] = {mode.name: mode for mode in (IPTABLES_MODE, IPVS_MODE, NFTABLES_MODE, USERSPACE_MODE)}
#: The modes that ``auto`` tries, in this order; if none is possible, the agent forwards connections itself.
_PREFERRED: Tuple[Mode, ...] = (NFTABLES_MODE, IPVS_MODE, IPTABLES_MODE)
_LAST_RESORT: Mode = USERSPACE_MODE


#: ipvs mode by the name of its glue, in the order in which ``auto`` tries them.
_GLUES: Dict[str, Mode] = {mode.glue: mode for mode in (IPVS_MODE, IPVS_WITH_NFTABLES)}


class ChosenMode(NamedTuple):
    """The mode in effect, why it was selected, and warnings."""

    mode: Mode
    reason: str
    warnings: Tuple[str, ...] = ()


def mode_named(name: str) -> Mode:
    """Return the mode of that name. Raises ConfigurationError if there is none."""
    mode = _MODES.get(name)
    if mode is None:
        raise ConfigurationError(f"mode: {name!r} is not one of {', '.join(MODES)}")
    return mode


def mode_without_node(request: Request) -> Mode:
    """Return the mode that the request names, without looking at any node; in ipvs mode ``auto`` is the glue iptables.

    Raises ConfigurationError for the mode ``auto``.
    """
    if request.configuration.node_proxy.network_policy.only:
        return NO_MODE
    name = request.mode or request.configuration.mode
    if name not in _MODES:
        raise ConfigurationError(f"mode: {name!r} cannot be rendered without a node; use one of {', '.join(MODES)}")
    mode = _MODES[name]
    return _GLUES.get(request.configuration.node_proxy.ipvs_glue, mode) if mode is IPVS_MODE else mode


def _with_glue(mode: Mode, request: Request) -> ChosenMode:
    """Return ipvs mode with the glue of the configuration, and why that is the one; other modes as they are.

    ``auto``: the glue that serves this node now, so that nothing changes by itself, else the first that this node has
    all for. Raises PreflightError without the rights to determine that, KernelError.
    """
    if mode is not IPVS_MODE:
        return ChosenMode(mode, "")
    wanted = request.configuration.node_proxy.ipvs_glue
    if wanted in _GLUES:
        return ChosenMode(_GLUES[wanted], f"glue {wanted}: set in the configuration")
    judge(rights_findings(capabilities()), request.ignore_findings)
    serving = _serving_glue()
    if serving is not None:
        return ChosenMode(serving, f"glue {serving.glue}: this node is served with it")
    reasons: List[str] = []
    for preferred in _GLUES.values():
        lacking = _obstacles(preferred, request) or preferred.unsupported_reasons(supported_families())
        if not lacking:
            chosen = f"glue {preferred.glue}: this node has all that it needs"
            return ChosenMode(preferred, "; ".join([chosen, *reasons]))
        reasons.append(f"glue {preferred.glue} is not possible: {'; '.join(lacking)}")
    return ChosenMode(mode, "; ".join(reasons))


def _serving_glue() -> Optional[Mode]:
    """Return ipvs mode with the glue that is on this node, None if there is none. Loads nothing. Raises KernelError."""
    families = supported_families()
    with KernelHandles() as handles:
        if handles.has_nftables() and any(handles.ipvs_table(family).exists() for family in families):
            return IPVS_WITH_NFTABLES
        if handles.has_ipset() and any(set_resources(handles, family).sets.observe() for family in families):
            return IPVS_MODE
    return None


def _obstacles(mode: Mode, request: Request) -> List[str]:
    """Return what this node lacks for the mode, without changing it. Conflicts with other programs are ignored."""
    schedulers = request.configuration._replace(mode=mode.name).effective_schedulers
    intention = Intention(needs=mode.needs, families=supported_families(), schedulers=schedulers)
    return [
        str(finding)
        for finding in preflight(intention)
        if finding.severity == ERROR and finding.name not in (*request.ignore_findings, *CONFLICTS)
    ]


def choose_mode(request: Request) -> ChosenMode:
    """Return the mode that the request, or else the configuration, names.

    ``auto`` selects the first of nftables, ipvs and iptables that this node can run; for nftables the kernel validates
    a table with everything that the mode uses, without keeping it. On a node that can run none of them, the agent
    selects userspace. With a fallback, iptables replaces ipvs on a node that cannot run it, with a warning that says
    why. Where another program serves the Services (``networkPolicy.only``), no mode is in effect, whatever is named.
    Raises ConfigurationError for an unknown mode or fallback, PreflightError if ``auto`` finds no mode.
    """
    if request.configuration.node_proxy.network_policy.only:
        return ChosenMode(NO_MODE, "networkPolicy.only: another program serves the Services")
    wanted = request.mode or request.configuration.mode
    if request.fallback not in ("", IPTABLES_MODE.name):
        raise ConfigurationError(f"fallback: {request.fallback!r} is not {IPTABLES_MODE.name}")
    if wanted == AUTO:
        return _automatic(request)
    if wanted not in _MODES:
        raise ConfigurationError(f"mode: {wanted!r} is not one of {', '.join((*MODES, AUTO))}")
    asked = "requested" if request.mode else "set in the configuration"
    mode, glue, *_none = _with_glue(mode_named(wanted), request)
    asked = "; ".join(text for text in (asked, glue) if text)
    if mode.needs_agent and not (request.check or request.agent):
        raise PreflightError(f"{NO_AGENT}; run the agent on this node, or use another mode")
    if mode.glue and request.fallback:
        obstacles = _obstacles(mode, request)
        if obstacles:
            fallback = mode_named(request.fallback)
            why = f"fallback from {mode.name}, which this node cannot run: {'; '.join(obstacles)}"
            return ChosenMode(fallback, why, (f"mode {fallback.name} is used: {why}",))
    return ChosenMode(mode, asked, _cautions(mode, request))


def _cautions(mode: Mode, request: Request) -> Tuple[str, ...]:
    policies = request.configuration.node_proxy.network_policy.enabled
    return tuple(text for text in (mode.caution, mode.policy_caution if policies else "") if text)


def _may_forward(request: Request) -> bool:
    """Return whether the caller is the agent, or checks a node where one runs."""
    return request.agent or (request.check and os.path.exists(control_socket(request.state_directory)))


def _automatic(request: Request) -> ChosenMode:
    # Otherwise a right that this process lacks would be reported as a feature that the kernel lacks.
    judge(rights_findings(capabilities()), request.ignore_findings)
    reasons: List[str] = []
    for preferred in _PREFERRED:
        mode, glue, *_none = _with_glue(preferred, request)
        obstacles = _obstacles(mode, request) or mode.unsupported_reasons(supported_families())
        if not obstacles:
            chosen = f"auto: this node has all that {mode.name} mode needs"
            return ChosenMode(mode, "; ".join([chosen, *([glue] if glue else []), *reasons]))
        reasons.append(f"{mode.name} mode is not possible: {'; '.join(obstacles)}")
    why = "; ".join(reasons)
    if not _may_forward(request):
        raise PreflightError(f"auto: {why}; {NO_AGENT}")
    return ChosenMode(_LAST_RESORT, f"auto: {why}", _cautions(_LAST_RESORT, request))
