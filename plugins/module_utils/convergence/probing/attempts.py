# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attempts to reach served addresses by TCP, UDP, TLS, HTTP and DNS, repeated until they succeed or time out.

A probe is a URL: ``tcp://10.96.0.1:443``, ``udp://10.96.0.5:514``, ``tls://10.96.0.1:443``, ``http://10.96.0.7/ready``
(also ``https``), ``dns://10.96.0.10/kubernetes.default.svc.cluster.local``. Certificates are not verified.
"""

from __future__ import annotations

import errno
import http.client
import secrets
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Sequence
from urllib.parse import urlsplit

from ...base.addresses import canonical_address
from ...base.errors import ConfigurationError, errors_as
from .probe import DEFAULT_NAME, Probe, ProbeResult

_PORTS = {"http": 80, "https": 443, "dns": 53}
_PAUSE_SECONDS = 0.3
_SHORTEST_AGAIN_SECONDS = 0.5
_ATTEMPT_SECONDS = 2.0
# Attempts that are made at the same time; each of them may wait for its timeout.
_CONCURRENT = 16


def parse_probe(text: str) -> Probe:
    """Return the probe that a URL describes. Raises ConfigurationError."""
    with errors_as(ConfigurationError, f"probe {text!r}", ValueError):
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    if parts.scheme not in _WAYS:
        raise ConfigurationError(f"probe {text!r}: does not begin with one of {', '.join(_WAYS)} and ://")
    port = port or _PORTS.get(parts.scheme, 0)
    if not host or not port or parts.username is not None:
        raise ConfigurationError(f"probe {text!r}: is not of the form {parts.scheme}://HOST:PORT")
    if not _is_host(host):
        raise ConfigurationError(f"probe {text!r}: {host!r} is not the name of a host")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if parts.scheme in ("tcp", "udp", "tls") and path not in ("", "/"):
        raise ConfigurationError(f"probe {text!r}: {parts.scheme} has no path")
    if parts.scheme == "dns":
        path = path.strip("/") or DEFAULT_NAME
        _question(path, 0)
    elif parts.scheme in ("http", "https"):
        path = path or "/"
        if any(not "!" <= letter <= "~" for letter in path):
            raise ConfigurationError(
                f"probe {text!r}: the path contains a space, a control character or a non-ASCII character"
            )
    else:
        path = ""
    return Probe(parts.scheme, canonical_address(host) or host, port, path)


def _is_host(name: str) -> bool:
    """Return whether a name can be resolved: each label has 1 to 63 octets in ASCII or IDNA form (RFC 3490)."""
    if not name.isprintable() or " " in name:
        return False
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def _question(name: str, number: int) -> bytes:
    """Return a DNS query for the A record of a name (RFC 1035). Raises ConfigurationError."""
    labels = [label.encode("ascii", "replace") for label in name.rstrip(".").split(".")]
    if any(not 1 <= len(label) <= 63 or b"?" in label for label in labels) or len(name) > 253:
        raise ConfigurationError(f"probe of DNS: {name!r} is not a name")
    encoded = b"".join(bytes((len(label),)) + label for label in labels)
    return struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + encoded + b"\x00" + struct.pack(">HH", 1, 1)


def _tcp(probe: Probe, seconds: float) -> str:
    with socket.create_connection((probe.host, probe.port), seconds):
        return ""


def _datagram(probe: Probe, seconds: float, payload: bytes) -> bytes:
    family, kind, protocol, _name, address = socket.getaddrinfo(probe.host, probe.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(seconds)
        sock.connect(address)
        sock.send(payload)
        return sock.recv(4096)


def _udp(probe: Probe, seconds: float) -> str:
    _datagram(probe, seconds, b"\n")
    return ""


def _dns(probe: Probe, seconds: float) -> str:
    number = secrets.randbelow(65536)
    answer = _datagram(probe, seconds, _question(probe.path, number))
    if len(answer) < 12 or struct.unpack(">H", answer[:2])[0] != number:
        return "the reply does not answer the query"
    code = answer[3] & 0xF
    # NXDOMAIN (3) is an answer, too; SERVFAIL (2) and REFUSED (5) are failures of the server.
    return "" if code in (0, 3) else f"the server answered with code {code}"


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _tls(probe: Probe, seconds: float) -> str:
    """Succeed if the server answers the first message of the handshake, also with a refusal."""
    with socket.create_connection((probe.host, probe.port), seconds) as sock:
        try:
            with _unverified().wrap_socket(sock):
                return ""
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return "the server closed the connection"
        except ssl.SSLError:
            return ""


def _http(probe: Probe, seconds: float) -> str:
    if probe.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            probe.host, probe.port, timeout=seconds, context=_unverified()
        )
    else:
        connection = http.client.HTTPConnection(probe.host, probe.port, timeout=seconds)
    try:
        connection.request("GET", probe.path, headers={"Connection": "close"})
        status = connection.getresponse().status
    finally:
        connection.close()
    return "" if status < 400 else f"the server answered with status {status}"


_WAYS: dict[str, Callable[[Probe, float], str]] = {
    "tcp": _tcp,
    "udp": _udp,
    "tls": _tls,
    "http": _http,
    "https": _http,
    "dns": _dns,
}


def attempt(probe: Probe, seconds: float = _ATTEMPT_SECONDS) -> str:
    """Run a probe once; return the reason of its failure, empty if it succeeded."""
    try:
        return _WAYS[probe.scheme](probe, seconds)
    except (socket.timeout, TimeoutError):
        return f"no answer within {seconds:g} seconds"
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return "the connection was refused"
        return error.strerror or str(error) or type(error).__name__
    except http.client.HTTPException as error:
        return f"the answer is not HTTP: {error or type(error).__name__}"


def run_probes(probes: Sequence[Probe], seconds: float) -> list[ProbeResult]:
    """Run probes until each has succeeded or ``seconds`` have passed; every probe runs at least once.

    Several are attempted at the same time, so one that is not answered does not delay the others.
    """
    started = time.monotonic()
    waiting = list(dict.fromkeys(probes))
    results: dict[Probe, ProbeResult] = {}

    def again(probe: Probe) -> None:
        left = seconds - (time.monotonic() - started)
        reason = attempt(probe, min(_ATTEMPT_SECONDS, max(round(left, 1), 0.1)))
        attempts = results[probe].attempts + 1 if probe in results else 1
        results[probe] = ProbeResult(probe, not reason, reason, attempts, round(time.monotonic() - started, 3))

    with ThreadPoolExecutor(max_workers=_CONCURRENT) as pool:
        while True:
            list(pool.map(again, waiting))
            waiting = [probe for probe in waiting if not results[probe].answered]
            # The reason of an attempt that has less time would say nothing about the service.
            if not waiting or time.monotonic() - started + _PAUSE_SECONDS + _SHORTEST_AGAIN_SECONDS > seconds:
                return [results[probe] for probe in dict.fromkeys(probes)]
            time.sleep(_PAUSE_SECONDS)
