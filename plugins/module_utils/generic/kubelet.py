# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The server in kubelet's kubeconfig: replace it by an address that leads to all API servers, and restore it.

kubelet loses its node if it cannot verify an API server, so the file is changed only after each server has presented a
certificate that kubelet would accept at that address. A record of the previous content makes the change reversible. It
is kept until the running kubelet, which reads the file at its start only, has left the address.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Callable, NamedTuple, Optional, Sequence
from urllib.parse import urlsplit

from ..base.addresses import canonical_address, split_port
from ..base.errors import ApiError, ConfigurationError, os_errors
from ..base.regular_files import SMALL, read_regular
from ..base.whole_files import remove_file, write_whole
from ..cluster.api.access.certificate import Place, verified_certificate
from ..cluster.api.access.credentials import Credentials
from ..cluster.api.access.server_field import server_field, with_server
from ..cluster.api.connection import Access, ApiConnection, resolve
from ..preflight.kubelet import (
    BACKUP,
    RECORD,
    Record,
    Started,
    kubelet_start,
    moment_of_change,
    present_moment,
    read_record,
    reads_between,
)

_PAUSE_SECONDS = 0.3
_ATTEMPT_SECONDS = 3.0

#: Replaces a file, keeping its owner, permission bits and security context; arguments are the path and the content.
Store = Callable[[str, bytes], None]


class KubeconfigChange(NamedTuple):
    """The file, the servers in it before and after (equal if it was or would be unchanged), the backup, warnings.

    ``in_use``: the address that the running kubelet still uses, although it was removed from the file; or empty.
    """

    path: str
    before: str
    after: str
    backup: str = ""
    warnings: Sequence[str] = ()
    in_use: str = ""


def parse_place(text: str, default_port: int) -> Place:
    """Parse ``ADDRESS``, ``ADDRESS:PORT`` or ``[ADDRESS]:PORT``. Raises ConfigurationError."""
    found = split_port(text, default_port)
    address = canonical_address(found[0]) if found is not None else None
    if found is None or address is None:
        raise ConfigurationError(f"{text!r} is not of the form ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT")
    return Place(address, found[1])


def verify_servers(
    access: Access, address: Place, servers: Sequence[Place], seconds: float, *, served: bool
) -> list[str]:
    """Verify that each server, and the address itself, presents a certificate that is valid for the address.

    ``access``: of the kubeconfig, with the authority and perhaps ``tls-server-name``. ``served``: whether the address
    must lead to the servers already; if not, a failure of this part becomes a warning. Return the warnings. Raises
    ApiError with all failures in one line.
    """
    deadline = time.monotonic() + seconds
    name = access.server_name or address.address
    bare = access._replace(credentials=Credentials())
    failures: list[str] = []
    certificates = []
    for server in servers:
        try:
            certificates.append(_patiently(bare, server, name, deadline))
        except ApiError as error:
            failures.append(str(error))
    if failures:
        raise ApiError("; ".join(failures))
    try:
        if _patiently(bare, address, name, deadline) not in certificates:
            raise ApiError(f"API server {address}: presents a certificate that none of the servers has")
    except ApiError as error:
        if served:
            raise
        return [f"not served yet: {error}"]
    return []


def _patiently(access: Access, place: Place, name: str, deadline: float) -> bytes:
    """Return the certificate, connecting again until the deadline if the server cannot be reached. Raises ApiError."""
    while True:
        left = deadline - time.monotonic()
        try:
            return verified_certificate(access, place, name, min(_ATTEMPT_SECONDS, max(left, 0.5)))
        except ApiError as error:
            # An error about a certificate that lacks the name has no cause; it is not temporary.
            if error.__cause__ is None or deadline - time.monotonic() < _PAUSE_SECONDS:
                raise
        time.sleep(_PAUSE_SECONDS)


def point_to(
    path: str,
    address: Place,
    servers: Sequence[Place],
    *,
    seconds: float,
    check: bool,
    store: Store,
    record: str = RECORD,
) -> KubeconfigChange:
    """Write the address to the kubeconfig as its server, after :func:`verify_servers`.

    ``check``: change nothing. A file that names the address already is not verified again. Raises ProxyError; nothing
    is changed in that case.
    """
    if not servers:
        raise ConfigurationError("servers: is empty")
    path = os.path.realpath(path)
    known = read_record(record)
    url = f"https://{address}"
    text = _read(path)
    current = server_field(text, path).url
    if current == url:
        return KubeconfigChange(path, current, current, known.backup if known and known.path == path else "")
    access = _verifying(path)
    changed = with_server(text, url, path)
    warnings = verify_servers(access, address, servers, seconds, served=not check)
    if known is not None and known.path != path:
        moved = _restored(known, known.before, check, store)
        if not check:
            remove_file(known.backup)
        warnings += moved.warnings
        known = None
    # After a change of the address, the recorded server is still the original one, not the previous address.
    before = known.before if known is not None and current == known.written else current
    backup = path + BACKUP
    if not check:
        # If the address was there before, a kubelet that still uses it may have been started then.
        pointed = known.pointed if known is not None and known.written == url else present_moment()
        _write_beside(path, text, before == current, Record(path, before, url, backup, pointed), record)
        store(path, changed.encode())
    return KubeconfigChange(path, current, url, backup, warnings)


def _verifying(path: str) -> Access:
    """Return the kubeconfig's access. Raises ProxyError for one by which kubelet would not verify the API servers."""
    access = resolve(ApiConnection(kubeconfig=path))
    for field, given in (("insecure-skip-tls-verify", not access.verify), ("proxy-url", access.proxy_url)):
        if given:
            raise ConfigurationError(f"{path}: the kubeconfig has {field}, so kubelet would not verify the API servers")
    return access


def restore(
    *,
    check: bool,
    store: Store,
    kept: Optional[Place] = None,
    servers: Sequence[Place] = (),
    seconds: float = 0.0,
    record: str = RECORD,
    started: Started = kubelet_start,
) -> Optional[KubeconfigChange]:
    """Restore the previous server and remove record and backup; return None if there is nothing to restore.

    ``kept``: an address that is still served; the file is not changed if it was pointed to this one. ``servers``: the
    API servers behind ``kept``, to which the file will be pointed next; nothing is changed unless they present
    certificates for it, and one of them is used if the previous server does not answer. Only the server is restored,
    since other fields may have been renewed. A server that another program has written meanwhile is kept. The record
    stays as long as the running kubelet uses the address. Raises ProxyError.
    """
    known = read_record(record)
    if known is None or (kept is not None and known.written == f"https://{kept}"):
        return None
    before = known.before
    if kept is not None and servers and not known.left and os.path.exists(known.path):
        access = _verifying(known.path)
        verify_servers(access, kept, servers, seconds, served=False)
        before = _answering(access, known.before, servers, seconds)
    outcome = _restored(known, before, check, store)
    left = _left(known, outcome)
    used = bool(left) and reads_between(started(), known.pointed, left)
    if not check:
        remove_file(known.backup)
        if used:
            _write_record(known._replace(left=left), record)
        else:
            remove_file(record)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(record))
    return outcome._replace(in_use=known.written) if used else outcome


def _left(known: Record, outcome: KubeconfigChange) -> str:
    """Return the moment at which the address was removed from the file, empty if there is no file any more."""
    if outcome.before != outcome.after:
        return present_moment()
    try:
        return known.left or moment_of_change(known.path)
    except FileNotFoundError:
        return ""


def _answering(access: Access, before: str, servers: Sequence[Place], seconds: float) -> str:
    """Return the previous server if it answers, else the first of the API servers that kubelet could use directly."""
    deadline = time.monotonic() + seconds
    bare = access._replace(credentials=Credentials())
    found = urlsplit(before)
    previous = Place(found.hostname or "", found.port or 443)
    failures: list[str] = []
    for place, url in ((previous, before), *((server, f"https://{server}") for server in servers)):
        try:
            left = min(_ATTEMPT_SECONDS, max(deadline - time.monotonic(), 0.5))
            verified_certificate(bare, place, access.server_name or place.address, left)
        except ApiError as error:
            failures.append(str(error))
        else:
            return url
    raise ApiError("; ".join(failures))


def _restored(known: Record, before: str, check: bool, store: Store) -> KubeconfigChange:
    if not os.path.exists(known.path):
        return KubeconfigChange(known.path, "", "")
    text = _read(known.path)
    current = server_field(text, known.path).url
    if current != known.written:
        warning = f"{known.path}: the server {current} is kept, because another program has written it"
        warnings = () if known.left or current == known.before else (warning,)
        return KubeconfigChange(known.path, current, current, "", warnings)
    if not check:
        store(known.path, with_server(text, before, known.path).encode())
    return KubeconfigChange(known.path, current, before)


def _write_beside(path: str, text: str, original: bool, made: Record, record: str) -> None:
    """Write the backup, unless this is not the original file, and the record. Raises ConfigurationError."""
    if original:
        with os_errors(ConfigurationError, f"nothing was changed: {made.backup}: cannot be written"):
            status = os.stat(path)
            write_whole(made.backup, text.encode(), status.st_mode & 0o777, (status.st_uid, status.st_gid))
    _write_record(made, record, "nothing was changed: ")


def _write_record(made: Record, path: str, effect: str = "") -> None:
    """Write the record. Raises ConfigurationError, with the effect of that."""
    with os_errors(ConfigurationError, f"{effect}{path}: cannot be written"):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        write_whole(path, json.dumps(made._asdict(), indent=1).encode() + b"\n")


def _read(path: str) -> str:
    try:
        with os_errors(ConfigurationError, f"{path}: the kubeconfig cannot be read"):
            return read_regular(path, 16 * SMALL).decode()
    except ValueError as error:
        raise ConfigurationError(f"{path}: the kubeconfig is not UTF-8 text") from error
