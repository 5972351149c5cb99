# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``outsideHost``: a host that is not a node of the cluster and uses its Services, and which of them it serves."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ...cluster.model import Service
from ..field import HONOURED, Field
from ..reader import Section


class OutsideHost(NamedTuple):
    """``enabled``: the host is outside the cluster. ``namespaces``, ``labelled``: limit the Services that it serves."""

    enabled: bool = False
    namespaces: Tuple[str, ...] = ()
    labelled: bool = False

    def serves(self, service: Service) -> bool:
        """Return whether the host serves a Service: one of its namespaces, or one with the label; else all.

        Static Services are always served.
        """
        if not self.enabled or service.static or not (self.namespaces or self.labelled):
            return True
        return service.namespace in self.namespaces or (self.labelled and service.for_outside_hosts)


FIELDS = (
    Field(
        "outsideHost.enabled",
        "outside_host.enabled",
        "`false`",
        "all",
        HONOURED,
        "the [host is outside the cluster](outside-hosts.md): it has no Node, and serves cluster IPs only",
    ),
    Field(
        "outsideHost.namespaces",
        "outside_host.namespaces",
        "all",
        "all",
        HONOURED,
        "namespaces whose Services such a host serves",
    ),
    Field(
        "outsideHost.labelled",
        "outside_host.labelled",
        "`false`",
        "all",
        HONOURED,
        "such a host serves, besides those namespaces, only Services with the label `kubenode.proxy/outside-hosts: "
        '"true"`',
    ),
)


def read(section: Section) -> OutsideHost:
    """Read and validate the section."""
    namespaces = section.namespaces("namespaces")
    found = OutsideHost(section.flag("enabled", False), namespaces, section.flag("labelled", False))
    section.finish()
    return found
