# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses of the cluster. All are inside the namespaces of one run."""

from __future__ import annotations

CONTROL = ("10.89.0.1", "fd00:10:89::1")
API_SERVER = f"https://{CONTROL[0]}:6443"
#: The first is the kubernetes Service's.
SERVICES = ("10.96.0.0/16", "fd00:10:96::/112")
DNS = ("10.96.0.10", "fd00:10:96::a")
PODS = ("10.244.0.0/16", "fd00:10:244::/56")
DOMAIN = "cluster.local"


def node_addresses(number: int) -> tuple[str, str]:
    """Return the addresses of the node of that number, from 1 on."""
    return f"10.89.0.{10 + number}", f"fd00:10:89::{10 + number}"


def pod_networks(number: int) -> tuple[str, str]:
    """Return the networks of that node's pods."""
    return f"10.244.{number}.0/24", f"fd00:10:244:{number}::/64"
