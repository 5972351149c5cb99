# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Loopback addresses must not become reachable from outside when iptables mode leaves a node.

For node ports on 127.0.0.1 kube-proxy sets ``route_localnet``, and a rule in KUBE-FIREWALL drops what others send to
loopback addresses (CVE-2020-8558). The one must not stay without the other, so this parameter is the only one that is
put back when that rule goes.
"""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernel.facts import read_text
from ..kernel.sysctls import SYSCTL_FILE_HEAD, SysctlsResource, boot_values, unchangeable
from ..rendering.iptables.fixed import KUBE_FIREWALL
from ..resources import Change, Kind, Resource, Stage

ROUTE_LOCALNET = "net.ipv4.conf.all.route_localnet"


class LocalnetRouting(Resource[str, str]):
    """``route_localnet``, where it is on and the rule that makes it safe is about to go; else nothing.

    ``chains``: the chains of IPv4 that go. A node whose administrator has set the parameter in a file keeps it.
    """

    kind = Kind.SYSCTLS

    def __init__(self, chains: Resource[Any, Any]) -> None:
        self._chains = chains
        self._sysctls = SysctlsResource([ROUTE_LOCALNET])

    def observe(self) -> Dict[str, str]:
        """The running value. Raises KernelError."""
        running = self._sysctls.observe()
        if running.get(ROUTE_LOCALNET) != "1" or not self._chains.observe().get(KUBE_FIREWALL):
            return {}
        boot = boot_values([ROUTE_LOCALNET]).get(ROUTE_LOCALNET)
        by_others = boot is not None and boot.value == "1" and not _is_ours(boot.file)
        return {} if by_others or unchangeable([ROUTE_LOCALNET]) else running

    def apply(self, change: Change[str, str]) -> None:
        """Switch it off. Raises KernelError."""
        self._sysctls.apply(change)

    def describe(self, key: str, value: str) -> List[str]:
        """As ``sysctl`` prints it."""
        return self._sysctls.describe(key, value)


def _is_ours(path: str) -> bool:
    return (read_text(path) or "").startswith(SYSCTL_FILE_HEAD)


def localnet_stage(chains: Resource[Any, Any]) -> Stage:
    """The stage that switches ``route_localnet`` off; it belongs before the one that takes the chains away."""
    return Stage(LocalnetRouting(chains), lambda observed: dict.fromkeys(observed, "0"))
