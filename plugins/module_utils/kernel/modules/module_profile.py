# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel modules that a mode needs: a pure function.

A scheduler of IPVS is a module as well.
"""

from __future__ import annotations

import re
from typing import Iterable, Mapping

from ...base.errors import ConfigurationError
from ...base.ipvs_schedulers import SCHEDULERS

_SCHEDULER = re.compile(r"[a-z0-9][a-z0-9_]{0,14}\Z")

# The modules that must be loaded before the first rule refers to them; the kernel itself loads match and target
# extensions when a rule that names them is added.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "iptables": ("nf_conntrack",),
    # Unloaded in reverse: ip_vs uses nf_conntrack.
    "ipvs": (
        "nf_conntrack",
        "ip_vs",
        "dummy",
        "ip_set",
        "ip_set_hash_ip",
        "ip_set_hash_ipport",
        "ip_set_hash_ipportip",
        "ip_set_hash_ipportnet",
        "ip_set_bitmap_port",
        "xt_set",
    ),
    "nftables": ("nf_tables", "nf_conntrack", "nft_chain_nat"),
    # The kernel itself loads the driver of a device that is created.
    "userspace": (),
    # Network policies only.
    "none": ("nf_tables", "nf_conntrack"),
}
# Instead of the above, for the filter backends of ipvs mode that are not made of ipsets and iptables.
_MODULES_OF_FILTER_BACKEND: Mapping[str, tuple[str, ...]] = {
    "nftables": ("nf_conntrack", "ip_vs", "dummy", "nf_tables", "nft_chain_nat")
}


def scheduler_module(scheduler: str) -> str:
    """Return the module that provides an IPVS scheduler: ``rr`` gives ``ip_vs_rr``. Raises ConfigurationError.

    Schedulers that are not in the kernel's own sources are allowed: vendors name their modules by the same rule.
    """
    if not _SCHEDULER.match(scheduler):
        known = ", ".join(SCHEDULERS)
        raise ConfigurationError(f"IPVS scheduler {scheduler!r}: not a scheduler name (the kernel knows {known})")
    return f"ip_vs_{scheduler}"


def modules_for(
    mode: str,
    schedulers: Iterable[str] = (),
    release: tuple[int, int, int] = (6, 1, 0),
    bridge_netfilter: bool = False,
    filter_backend: str = "",
) -> list[str]:
    """Return the modules to load before a mode is programmed, in loading order, without duplicates.

    ``mode``: iptables, ipvs, nftables, userspace, or none for network policies only. ``schedulers``: in mode ipvs those
    in use, ``rr`` if empty; ignored otherwise. ``release``: kernel version (before 4.19 IPv4 connection tracking is a
    separate module).
    ``bridge_netfilter``: also br_netfilter, which pods on one bridge need to reach each other by Service address.
    ``filter_backend``: in mode ipvs, iptables (the default) or nftables. Raises ConfigurationError.
    """
    if mode not in _MODULES:
        raise ConfigurationError(f"mode {mode!r}: not one of {', '.join(_MODULES)}")
    names: list[str] = []
    for name in _MODULES_OF_FILTER_BACKEND.get(filter_backend, _MODULES[mode]):
        names.append(name)
        if name == "ip_vs":
            names.extend(scheduler_module(scheduler) for scheduler in list(schedulers) or ["rr"])
        if name == "nf_conntrack" and release < (4, 19, 0):
            names.append("nf_conntrack_ipv4")
    if bridge_netfilter:
        names.append("br_netfilter")
    return list(dict.fromkeys(names))
