# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chain names of iptables mode, equal to kube-proxy's, so that a node can be taken over in place.

A name is a prefix and 16 characters of the SHA-256 of the ServicePort (and endpoint), in standard Base32 (RFC 4648).
"""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256

#: The chains of the table nat that redirect frontends: those with an address, and node ports.
SERVICES_CHAIN = "KUBE-SERVICES"
NODE_PORTS_CHAIN = "KUBE-NODEPORTS"

CLUSTER_PREFIX = "KUBE-SVC-"
LOCAL_PREFIX = "KUBE-SVL-"
EXTERNAL_PREFIX = "KUBE-EXT-"
FIREWALL_PREFIX = "KUBE-FW-"
ENDPOINT_PREFIX = "KUBE-SEP-"
PREFIXES = (CLUSTER_PREFIX, LOCAL_PREFIX, EXTERNAL_PREFIX, FIREWALL_PREFIX, ENDPOINT_PREFIX)


def hash16(text: str) -> str:
    """Return the first 16 Base32 characters, upper case, of the SHA-256 of the UTF-8 bytes of ``text``."""
    return b32encode(sha256(text.encode()).digest()[:10]).decode()


def endpoint_chain(service_port: str, protocol: str, endpoint: str) -> str:
    """Return the chain name of one endpoint, given as ``ip:port`` text, of a ServicePort."""
    return ENDPOINT_PREFIX + hash16(service_port + protocol + endpoint)
