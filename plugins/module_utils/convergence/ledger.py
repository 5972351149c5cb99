# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the node was last programmed with, as far as the kernel cannot tell: the endpoints of UDP Services.

kube-proxy 1.36 looks for stale conntrack entries only after a sync in which the endpoints of a Service changed that
has, or had, a UDP port with endpoints. A one-shot convergence has to remember those endpoints from one run to the next.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from typing import Dict

from ..cluster.state import ClusterState
from ..errors import KernelError
from ..kernel.files import remove_file
from ..whole_files import write_whole

_VERSION = 1
_FILE = "ledger.json"
#: How unfinished ones begin, those of earlier versions too.
_TEMPORARY = ".ledger"
#: What an agent that was killed leaves in the directory.
_SOCKET = "agent.sock"


def udp_endpoints(cluster: ClusterState) -> Dict[str, str]:
    """Per Service (``namespace/name``) with UDP endpoints, a digest of the UDP ports and endpoints of its slices."""
    digests = {}
    for service, slices in cluster.slices.items():
        udp = [
            (
                endpoint_slice.family,
                [port for port in endpoint_slice.ports if port.protocol == "UDP"],
                endpoint_slice.endpoints,
            )
            for _name, endpoint_slice in sorted(slices.items())
            if endpoint_slice.endpoints and any(port.protocol == "UDP" for port in endpoint_slice.ports)
        ]
        if udp:
            digests[str(service)] = hashlib.sha256(repr(udp).encode()).hexdigest()
    return digests


def read_ledger(directory: str) -> Dict[str, str]:
    """The UDP endpoints of the last convergence; empty when there was none or its record is not readable."""
    try:
        with open(os.path.join(directory, _FILE), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        return {}
    known = record.get("udp_endpoints")
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}


def write_ledger(directory: str, endpoints: Dict[str, str]) -> None:
    """Record the UDP endpoints that have been programmed, atomically. Raises KernelError."""
    path = os.path.join(directory, _FILE)
    record = json.dumps({"version": _VERSION, "udp_endpoints": endpoints}, sort_keys=True)
    try:
        write_whole(path, record.encode())
    except OSError as error:
        raise KernelError(f"{path}: cannot be written: {error.strerror}") from error


def forget(directory: str) -> None:
    """Remove what is remembered, and what a run that was killed left beside it. Raises KernelError."""
    names = [os.path.join(directory, name) for name in (_FILE, _SOCKET)]
    for path in [*names, *glob.glob(os.path.join(glob.escape(directory), f"{_TEMPORARY}*"))]:
        remove_file(path)
