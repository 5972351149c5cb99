# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Data that one convergence leaves for the next because the kernel does not have it: the endpoints of UDP Services.

Stale conntrack entries are deleted only if the UDP endpoints of a Service changed (see ``serviceports.udp``), so a
one-shot convergence has to save their digests from one run to the next.

An unattended run also records that it refused a loss of Services, because the next run applies it (see ``loss``).

The file is written in place, because unprivileged runs may write the file but not its directory. If a run is killed
while writing, the file is not valid JSON and counts as missing: the next run looks for stale entries once more.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import Any, Dict, Iterable, List, Mapping

from ...errors import KernelError
from ...kernel.files import remove_file
from ...regular_files import open_regular, parse_json, read_regular
from ...serviceports.info import ServicePortInfo
from ...serviceports.udp import udp_changed, udp_digest
from ..family import FamilyServices
from .state_directory import CONTROL_SOCKET, control_socket

_VERSION = 1
_FILE = "ledger.json"
#: The prefix of temporary files of earlier versions.
_TEMPORARY = ".ledger"
#: Limit of the file: 100,000 Services with names of the maximum length.
_MOST_BYTES = 64 << 20


def udp_digests(families: Iterable[FamilyServices]) -> Dict[str, str]:
    """Return the digest of each Service with serving UDP endpoints, by family and name (``IPv4 namespace/name``)."""
    digests = {}
    for context, service_ports in families:
        udp: Dict[str, List[ServicePortInfo]] = {}
        for key, info in service_ports.items():
            if key.protocol == "UDP":
                udp.setdefault(f"{context.family} {key.service}", []).append(info)
        digests.update({name: udp_digest(ports) for name, ports in udp.items()})
    return {name: digest for name, digest in digests.items() if digest}


def may_be_stale(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether any Service may have stale conntrack entries, from the digests of two runs."""
    return any(udp_changed(before.get(name, ""), digest) for name, digest in now.items())


def _read(directory: str) -> Dict[str, Any]:
    """Return the record, empty when there is none or it is not valid."""
    try:
        record = parse_json(read_regular(os.path.join(directory, _FILE), _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("version") == _VERSION else {}


def read_ledger(directory: str) -> Dict[str, str]:
    """Return the digests of the last convergence; empty if there was none or its record is not valid."""
    known = _read(directory).get("udp_endpoints")
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        return {}
    return known


def write_ledger(directory: str, digests: Dict[str, str]) -> None:
    """Record the digests of the UDP endpoints that are programmed; the caller holds the lock. Raises KernelError."""
    remark = "the next run checks connections of UDP Services again"
    _write(directory, {**_read(directory), "udp_endpoints": digests}, remark)


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
