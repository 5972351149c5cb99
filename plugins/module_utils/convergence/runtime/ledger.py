# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Data that one convergence leaves for the next because the kernel does not have it: what UDP Services had.

Stale conntrack entries are deleted only if the UDP endpoints of a Service changed or its addresses went (see
``serviceports.flows``), so a one-shot convergence must save these from one run to the next.

It also identifies the cluster whose Services are programmed, so that those of another one do not replace them. An
unattended run also records that it refused a loss of Services, because the next run applies it (see ``loss``).

The file is written in place, because unprivileged runs may write the file but not its directory. If a run is killed
while writing, the file is not valid JSON and counts as missing: the next run looks for stale entries once more.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ...base.addresses import canonical_address
from ...base.errors import KernelError
from ...base.regular_files import open_regular, parse_json, read_regular
from ...base.whole_files import remove_file
from ...cluster.model import NamespacedName
from ...preflight.cluster_state import FIRST_SERVICES
from ...serviceports.flows import Frontend, frontends_of, serving_digest
from ..family import FamilyServices
from .state_directory import LEDGER, LEDGER_BYTES, control_socket

_VERSION = 1


class Flows(NamedTuple):
    """The data of one convergence that determine which connection tracking entries are stale.

    ``frontends``: the addresses whose entries end with their Service. ``serving``: a digest of all serving endpoints.
    """

    frontends: frozenset[Frontend] = frozenset()
    serving: str = ""


def flows_of(families: Sequence[FamilyServices], protocols: Sequence[str]) -> Flows:
    """Return the data of a convergence; ``protocols``: those whose entries end with their Service."""
    chosen = [info for item in families for info in item.service_ports.values() if info.key.protocol in protocols]
    frontends = frozenset(frontend for info in chosen for frontend in frontends_of(info))
    return Flows(frontends, serving_digest(chosen))


def _read(directory: str) -> dict[str, Any]:
    """Return the record, empty when there is none or it is not valid."""
    try:
        record = parse_json(read_regular(os.path.join(directory, LEDGER), LEDGER_BYTES))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("version") == _VERSION else {}


def read_ledger(directory: str) -> Flows:
    """Return the endpoints and addresses of the last convergence; empty if there was none or it is not valid."""
    record = _read(directory)
    frontends, serving = record.get("frontends", []), record.get("serving", "")
    if not isinstance(frontends, list):
        frontends = []
    read = frozenset(item for item in map(_frontend, frontends) if item is not None)
    return Flows(read, serving if isinstance(serving, str) else "")


def _frontend(raw: object) -> Optional[Frontend]:
    """Return a recorded address, None if it is not valid."""
    if not isinstance(raw, list) or len(raw) != 3:
        return None
    protocol, address, port = raw
    if protocol not in ("TCP", "UDP", "SCTP") or not isinstance(port, int) or not 0 < port < 65536:
        return None
    if not isinstance(address, str) or canonical_address(address) != (address or None):
        return None
    return Frontend(protocol, address, port)


def write_ledger(directory: str, flows: Flows) -> None:
    """Record the endpoints and addresses that have been programmed; the caller holds the lock. Raises KernelError."""
    remark = "the next run checks connections of UDP Services again"
    record = _read(directory)
    for name, value in (("frontends", sorted(flows.frontends)), ("serving", flows.serving)):
        if value:
            record[name] = value
        else:
            record.pop(name, None)
    _write(directory, record, remark)


def loss_was_refused(directory: str) -> bool:
    """Return whether the last unattended run refused a loss of Services."""
    return _read(directory).get("loss_refused") is True


def record_loss(directory: str, refused: bool) -> None:
    """Record whether an unattended run refused a loss; the caller holds the lock. Raises KernelError."""
    if refused != loss_was_refused(directory):
        again = "the next run will refuse the loss again"
        remark = again if refused else "the next run applies a loss at once"
        _write(directory, {**_read(directory), "loss_refused": refused}, remark)


def read_origin(directory: str) -> dict[NamespacedName, str]:
    """Return what identifies the cluster whose Services are programmed (see ``preflight.cluster_state.origin_of``)."""
    recorded = _read(directory).get("origin")
    recorded = recorded if isinstance(recorded, dict) else {}
    return {service: str(recorded[str(service)]) for service in FIRST_SERVICES if str(service) in recorded}


def record_origin(directory: str, origin: Mapping[NamespacedName, str]) -> None:
    """Record whose Services are programmed, unless it is not known; the caller holds the lock. Raises KernelError."""
    record, named = _read(directory), {str(service): created for service, created in origin.items()}
    booted = record.pop("booted", "")
    if booted or (named and named != record.get("origin")):
        origin_now = {"origin": named} if named else {}
        _write(directory, {**record, **origin_now}, "the API server of another cluster is not recognized")


def has_converged(directory: str) -> bool:
    """Return whether the node has converged since it booted."""
    return bool(_read(directory))


def booted_from(directory: str) -> str:
    """Return the time of the state that a boot has restored (RFC 3339); empty after any other convergence."""
    found = _read(directory).get("booted", "")
    return found if isinstance(found, str) else ""


def record_boot(directory: str, time: str = "") -> None:
    """Record the time of the state that a boot has restored, or that the node has converged. Raises KernelError."""
    _write(directory, {**_read(directory), "booted": time}, "the state that the node has booted with is not known")


def _write(directory: str, record: dict[str, Any], remark: str) -> None:
    path = os.path.join(directory, LEDGER)
    content = json.dumps({**record, "version": _VERSION}, sort_keys=True).encode()
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as stream:
            # Without room for the record, the last one stays.
            os.posix_fallocate(descriptor, 0, len(content))
            stream.write(content)
            stream.truncate()
    except OSError as error:
        raise KernelError(f"{path}: cannot be written: {error.strerror}; {remark}") from error


def forget(directory: str) -> None:
    """Remove the record, and the socket of an agent that was killed. Raises KernelError."""
    socket = control_socket(directory)
    for path in (os.path.join(directory, LEDGER), socket):
        remove_file(path)
    # The directory contains other files, or does not exist.
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(socket))
