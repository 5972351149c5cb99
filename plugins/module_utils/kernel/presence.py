# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect whether this network namespace already serves Services or enforces policies, without loading a module."""

from __future__ import annotations

import contextlib
import socket
from typing import Iterator

from ..base.addresses import FAMILIES
from ..rendering.networkpolicy.sets import TABLE_NAME
from .facts import kernel_release, read_text
from .modules.modules import present_modules
from .netlink.protocol import NETLINK_NETFILTER
from .netlink.socket import NetlinkSocket
from .nftables.listing import NftTable, nft_chains, nft_tables
from .xtables.legacy_tables import TableReader

# The names are kube-proxy's, in all of its modes.
_DEVICE, _TABLE, _CHAIN = "kube-ipvs0", "kube-proxy", "KUBE-SERVICES"
_LEGACY_NAMES = ("/proc/net/ip_tables_names", "/proc/net/ip6_tables_names")
_LEGACY_MODULES = ("iptable_nat", "ip6table_nat")


def holds_dataplane() -> bool:
    """Return whether a service proxy's device, tables or chains exist here. Raises KernelError."""
    with contextlib.suppress(OSError):
        socket.if_nametoindex(_DEVICE)
        return True
    return _holds_table() or _holds_chains()


def holds_other_mode(chains: bool, table: bool) -> bool:
    """Return whether a service proxy programs iptables, or the table of nftables mode, and the caller does not.

    ``chains``, ``table``: what the caller programs. Raises KernelError.
    """
    return (not chains and _holds_chains()) or (not table and _holds_table())


def holds_policies() -> bool:
    """Return whether the table of network policies exists here. Raises KernelError."""
    if not present_modules(["nf_tables"], kernel_release()):
        return False
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return any(table.name == TABLE_NAME for table in nft_tables(sock, "inet"))


def _holds_table() -> bool:
    return any(table.name == _TABLE and table.uses for _sock, table, _family in _nft_tables())


def _holds_chains() -> bool:
    # Without iptables-nft's table there is no need to list the chains of all tables.
    for sock, table, family in _nft_tables():
        if table.name == "nat" and any(chain.name == _CHAIN for chain in nft_chains(sock, family)):
            return True
    return _in_legacy_tables()


def _nft_tables() -> Iterator[tuple[NetlinkSocket, NftTable, str]]:
    if present_modules(["nf_tables"], kernel_release()):
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for family in FAMILIES:
                for table in nft_tables(sock, family):
                    yield sock, table, family


def _in_legacy_tables() -> bool:
    for family, path, module in zip(FAMILIES, _LEGACY_NAMES, _LEGACY_MODULES):
        names = read_text(path)
        # Only root may read the names. A request for a table whose module is not loaded would load it.
        known = "nat" in names.split() if names is not None else bool(present_modules([module], kernel_release()))
        if known:
            with contextlib.closing(TableReader(family)) as reader:
                if reader.mentions("nat", _CHAIN):
                    return True
    return False
