# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a change of kubelet's kubeconfig, and whether the running kubelet has read that.

kubelet reads the file at its start only. The times that tell are seconds since the boot, by the clock with which
systemd records starts: it is never set, unlike the time of day. They are kept with the boot's identity, since they mean
nothing after another one.
"""

from __future__ import annotations

import os
import time
from typing import Callable, NamedTuple, Optional

from ..base.errors import ConfigurationError, KernelError
from ..base.regular_files import SMALL, parse_json, read_regular
from ..kernel.facts import boot_identity
from ..kernel.programs import run
from .findings import ERROR, KUBELET, WARNING, Finding

#: The record of the module kubelet_kubeconfig.
RECORD = "/var/lib/kubenode-proxy/kubelet.json"
#: Appended to the name of the previous file.
BACKUP = ".before-kubenode-proxy"
_PROPERTY = "ExecMainStartTimestampMonotonic"

#: Returns when the running kubelet was started, in seconds since the boot; None if none runs.
Started = Callable[[], Optional[float]]


def present_moment(age: float = 0.0) -> str:
    """Return this moment, or the one some seconds ago, in the form in which it is kept."""
    return f"{boot_identity()} {max(0.0, time.monotonic() - age):.6f}"


def moment_of_change(path: str) -> str:
    """Return the moment at which a file was written last. Raises OSError."""
    return present_moment(max(0.0, time.time() - os.stat(path).st_mtime))


def kubelet_start() -> Optional[float]:
    """Return when the running kubelet was started, None if none runs as ``kubelet.service`` of systemd."""
    try:
        done = run(["systemctl", "show", "kubelet.service", f"--property=MainPID,{_PROPERTY}"], timeout=30.0)
    except KernelError:
        return None
    found = dict(line.split("=", 1) for line in done.output.splitlines() if "=" in line)
    started = found.get(_PROPERTY, "")
    return int(started) / 1e6 if found.get("MainPID", "0") != "0" and started.isdigit() else None


def reads_between(started: Optional[float], written: str, replaced: str) -> bool:
    """Return whether a kubelet started at ``started`` has read what was in its file between two moments.

    An empty ``written`` means that it has been there for an unknown time, an empty ``replaced`` that it still is.
    """
    if started is None:
        return False
    if replaced and started > _seconds(replaced):
        return False
    return not written or started > _seconds(written)


def _seconds(moment: str) -> float:
    """Return the seconds of a moment, 0 for one before this boot or one that is not valid."""
    boot, _space, seconds = moment.partition(" ")
    try:
        return float(seconds) if boot == boot_identity() else 0.0
    except ValueError:
        return 0.0


class Record(NamedTuple):
    """A change: the file, the previous server, the server written, and the copy of the previous file.

    And the moments at which the server was written, and at which it was replaced, empty if that is unknown or has not
    happened; see :func:`reads_between`.
    """

    path: str
    before: str
    written: str
    backup: str
    pointed: str = ""
    left: str = ""


def read_record(path: str = RECORD) -> Optional[Record]:
    """Return the record of a change, None if there is none. Raises ConfigurationError for a damaged one."""
    try:
        found = parse_json(read_regular(path, SMALL))
        required, optional = Record._fields[:4], Record._fields[4:]
        return Record(*(str(found[field]) for field in required), *(str(found.get(field, "")) for field in optional))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path}: the record of the changed kubeconfig cannot be read: {error}"
        remedy = f"write the server from the file's copy (*{BACKUP}) back by hand, and remove the record"
        raise ConfigurationError(f"{problem}; {remedy}") from error


def used_server(record: str = RECORD, started: Started = kubelet_start) -> str:
    """Return our server that kubelet uses, now or after its next start; empty if none. Raises ConfigurationError."""
    known = read_record(record)
    if known is None or (known.left and not reads_between(started(), known.pointed, known.left)):
        return ""
    return known.written


def address_findings(check: bool) -> list[Finding]:
    """Return an error, or with ``check`` a warning, if kubelet uses an address of the API servers: it would lose them.

    For what removes or replaces what serves it. Raises ConfigurationError.
    """
    url = used_server()
    what = f"kubelet uses {url}, which would not be served any more"
    remedy = "restore its kubeconfig first, as the playbooks do, or with the module kubelet_kubeconfig, state absent"
    found = Finding(KUBELET, ERROR, what, remedy)
    return [found._replace(severity=WARNING) if check else found] if url else []


def is_unread(record: str = RECORD, started: Started = kubelet_start) -> bool:
    """Return whether the running kubelet was started before our server was written. Raises ConfigurationError."""
    known, begun = read_record(record), started()
    return known is not None and not known.left and begun is not None and begun <= _seconds(known.pointed)
