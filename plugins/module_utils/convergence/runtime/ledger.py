# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Data that one convergence leaves for the next because the kernel does not have it: the endpoints of UDP Services.

kube-proxy 1.36 deletes stale conntrack entries only after a sync in which the endpoints of a Service changed that has,
or had, a UDP port with endpoints. A one-shot convergence must save those endpoints from one run to the next.

An unattended run also records that it refused a loss of Services, because the next run applies it (see ``loss``).

The file is written in place, because unprivileged runs may write the file but not its directory. If a run is killed
while writing, the file is not valid JSON and counts as missing: the next run looks for stale entries once more.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from typing import Any, Dict

from ...cluster.state import ClusterState
from ...errors import KernelError
from ...kernel.files import remove_file
from ...regular_files import open_regular, parse_json, read_regular
from .state_directory import CONTROL_SOCKET, control_socket

_VERSION = 1
_FILE = "ledger.json"
#: The prefix of temporary files of earlier versions.
_TEMPORARY = ".ledger"
#: Limit of the file: 100,000 Services with names of the maximum length.
_MOST_BYTES = 64 << 20


def udp_endpoints(cluster: ClusterState) -> Dict[str, str]:
    """Map each Service (``namespace/name``) with UDP endpoints to a digest of its slices' UDP ports and endpoints."""
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


def _read(directory: str) -> Dict[str, Any]:
    """Return the record, empty when there is none or it is not valid."""
    try:
        record = parse_json(read_regular(os.path.join(directory, _FILE), _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("version") == _VERSION else {}


def read_ledger(directory: str) -> Dict[str, str]:
    """Return the UDP endpoints of the last convergence; empty when there was none or its record is not valid."""
    known = _read(directory).get("udp_endpoints")
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        return {}
    return known


def write_ledger(directory: str, endpoints: Dict[str, str]) -> None:
    """Record the UDP endpoints that have been programmed; the caller holds the lock. Raises KernelError."""
    remark = "the next run checks connections of UDP Services again"
    _write(directory, {**_read(directory), "udp_endpoints": endpoints}, remark)


def loss_was_refused(directory: str) -> bool:
    """Return whether the last unattended run refused a loss of Services."""
    return _read(directory).get("loss_refused") is True


def record_loss(directory: str, refused: bool) -> None:
    """Record whether an unattended run refused a loss; the caller holds the lock. Raises KernelError."""
    if refused != loss_was_refused(directory):
        remark = "the next run will refuse the loss again"
        _write(directory, {**_read(directory), "loss_refused": refused}, remark)


def _write(directory: str, record: Dict[str, Any], remark: str) -> None:
    path = os.path.join(directory, _FILE)
    text = json.dumps({**record, "version": _VERSION}, sort_keys=True)
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as stream:
            stream.truncate()
            stream.write(text.encode())
    except OSError as error:
        raise KernelError(f"{path}: cannot be written: {error.strerror}; {remark}") from error


def forget(directory: str) -> None:
    """Remove the record, and temporary files of runs and agents that were killed. Raises KernelError."""
    socket = control_socket(directory)
    names = [os.path.join(directory, _FILE), os.path.join(directory, CONTROL_SOCKET), socket]
    for path in [*names, *glob.glob(os.path.join(glob.escape(directory), f"{_TEMPORARY}*"))]:
        remove_file(path)
    # The directory contains other files, or does not exist.
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(socket))
