# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Protection of loopback addresses when iptables mode is removed from a node.

For node ports on 127.0.0.1 kube-proxy sets ``route_localnet``, and a rule in KUBE-FIREWALL drops packets from other
hosts to loopback addresses (CVE-2020-8558). The parameter must not remain set without the rule, so it is the only
parameter that is reset, when that rule is removed.
"""

from __future__ import annotations

from typing import Any, Dict, List

from ....base.whole_files import MANAGED_LINE
from ....kernel.facts import read_text
from ....kernel.parameters.sysctl_files import boot_values
from ....kernel.parameters.sysctls import SysctlsResource, unchangeable
from ....rendering.iptables.fixed import KUBE_FIREWALL
from ....resources import Change, Kind, Resource, Stage

ROUTE_LOCALNET = "net.ipv4.conf.all.route_localnet"


class LocalnetRouting(Resource[str, str]):
    """``route_localnet``, if it is set and the rule that makes it safe is about to be removed; else empty.

    ``chains``: the IPv4 chains that are removed. If the administrator has set the parameter in a file, it is kept.
    """

    kind = Kind.SYSCTLS

    def __init__(self, chains: Resource[Any, Any]) -> None:
        self._chains = chains
        self._sysctls = SysctlsResource([ROUTE_LOCALNET])

    def observe(self) -> Dict[str, str]:
        """Return the running value. Raises KernelError."""
        running = self._sysctls.observe()
        if running.get(ROUTE_LOCALNET) != "1" or not self._chains.observe().get(KUBE_FIREWALL):
            return {}
        boot = boot_values([ROUTE_LOCALNET]).get(ROUTE_LOCALNET)
        by_others = boot is not None and boot.value == "1" and not _is_ours(boot.file)
        return {} if by_others or unchangeable([ROUTE_LOCALNET]) else running

    def apply(self, change: Change[str, str]) -> None:
        """Disable it. Raises KernelError."""
        self._sysctls.apply(change)

    def describe(self, key: str, value: str) -> List[str]:
        """Return the entry as ``sysctl`` prints it."""
        return self._sysctls.describe(key, value)


def _is_ours(path: str) -> bool:
    return (read_text(path) or "").startswith(MANAGED_LINE)


def localnet_stage(chains: Resource[Any, Any]) -> Stage:
    """Return the stage that disables ``route_localnet``; it must come before the one that removes the chains."""
    return Stage(LocalnetRouting(chains), lambda observed: dict.fromkeys(observed, "0"))
