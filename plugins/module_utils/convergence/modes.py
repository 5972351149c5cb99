# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which mode a node runs in, and why."""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

from ..configuration.model import IPTABLES, IPVS, MODES, NFTABLES
from ..errors import ConfigurationError
from ..kernel.facts import supported_families
from ..kernel.nftables.probe import unsupported_reason
from ..preflight.check import Intention, preflight
from ..preflight.findings import CONFLICTS, ERROR
from .request import Request

AUTO = "auto"


class ChosenMode(NamedTuple):
    """The mode in effect, the reason in words, and warnings."""

    mode: str
    reason: str
    warnings: Tuple[str, ...] = ()


def _obstacles(mode: str, request: Request) -> List[str]:
    """What this node lacks for the mode, read only; other managers on the node do not count, they can be stopped."""
    schedulers = (request.configuration.scheduler,) if mode == IPVS else ()
    intention = Intention(mode=mode, families=supported_families(), schedulers=schedulers)
    return [
        str(finding)
        for finding in preflight(intention)
        if finding.severity == ERROR and finding.name not in (*request.ignore_findings, *CONFLICTS)
    ]


def choose_mode(request: Request) -> ChosenMode:
    """The mode that the request, or else the configuration, asks for.

    ``auto`` takes the first of nftables, ipvs and iptables that this node can run in; for nftables the kernel
    is asked to check, and not to keep, everything the mode is made of. With a fallback, ipvs on a node that cannot
    run it becomes iptables, with a warning that says why. Raises ConfigurationError for an unknown mode or fallback.
    """
    wanted = request.mode or request.configuration.mode
    if request.fallback not in ("", IPTABLES):
        raise ConfigurationError(f"fallback: {request.fallback!r} is not {IPTABLES}")
    if wanted == AUTO:
        return _automatic(request)
    if wanted not in MODES:
        raise ConfigurationError(f"mode: {wanted!r} is not one of {', '.join((*MODES, AUTO))}")
    asked = "asked for" if request.mode else "the configuration says so"
    if wanted == IPVS and request.fallback:
        obstacles = _obstacles(IPVS, request)
        if obstacles:
            why = f"fallback from ipvs, which this node cannot run: {'; '.join(obstacles)}"
            return ChosenMode(IPTABLES, why, (f"mode iptables is used: {why}",))
    return ChosenMode(wanted, asked)


def _automatic(request: Request) -> ChosenMode:
    reasons: List[str] = []
    for mode in (NFTABLES, IPVS):
        obstacles = _obstacles(mode, request)
        if mode == NFTABLES and not obstacles:
            obstacles = [text for text in map(unsupported_reason, supported_families()) if text]
        if not obstacles:
            return ChosenMode(mode, "; ".join([f"auto: this node has all that {mode} mode needs", *reasons]))
        reasons.append(f"{mode} mode is not possible: {'; '.join(obstacles)}")
    return ChosenMode(IPTABLES, f"auto: {'; '.join(reasons)}")
