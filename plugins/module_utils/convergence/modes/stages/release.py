# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages that remove what kube-proxy does not use: of the tables that it has taken over, and the one beside IPVS."""

from __future__ import annotations

import functools
from typing import cast

from ....base.addresses import FAMILIES
from ....base.errors import KernelError
from ....kernel.nftables.raw.unused import UnusedResource
from ....kernel.xtables.chains import ChainsResource
from ....kernel.xtables.variant import XtablesVariant
from ....rendering.ipvs.chains import LOAD_BALANCER_CHAIN
from ....rendering.ipvs.nftables_layout import SETTLING, TABLE_NAME
from ....rendering.served import served_cluster_ips
from ....resources import Stage
from ...family import removal_contexts
from ...handles import KernelHandles
from .chains import chain_ownership
from .ipvs import ipvs_resources
from .ipvs_filter_backend import filter_backend_resources, set_resources


def release_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages that remove objects that kube-proxy, now in charge in nftables or ipvs mode, does not use.

    Raises KernelError if kube-proxy does not serve yet.
    """
    if not handles.has_nftables():
        return []
    stages = [Stage(UnusedResource(family, functools.partial(handles.nftables, family)), {}) for family in FAMILIES]
    for family in FAMILIES:
        table = handles.ipvs_table(family)
        if SETTLING in table.observe():
            if not _kube_proxy_uses_ipvs(handles, family):
                raise KernelError(
                    f"table {TABLE_NAME} ({family}) filters beside IPVS, and kube-proxy has no chains of ipvs mode;"
                    " wait until it has, or converge to its mode first"
                )
            stages.append(Stage(table, {}))
    return stages


def serves_by_ipvs(handles: KernelHandles) -> bool:
    """Return whether IPVS has an endpoint of a Service, by the sets or the table beside it. Raises KernelError."""
    if not handles.has_ipvs():
        return False
    found = [(filter_backend_resources(handles, each).record(each), ipvs_resources(handles, each)) for each in FAMILIES]
    return bool(served_cluster_ips(table.observe() for record, of in found for table in (record, of.real_servers)))


def _kube_proxy_uses_ipvs(handles: KernelHandles, family: str) -> bool:
    """Return whether the node has the chains of kube-proxy's ipvs mode; without iptables here, whether it has its sets.

    kube-proxy creates the sets before the chains.
    """
    contexts = [context for context in removal_contexts([family]) if context.variant is not None]
    for context in contexts:
        chains = ChainsResource(cast(XtablesVariant, context.variant), chain_ownership(context.settings, True))
        if LOAD_BALANCER_CHAIN in chains.observe():
            return True
    return not contexts and handles.has_ipset() and bool(set_resources(handles, family).sets.observe())
