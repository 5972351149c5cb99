# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster's DNS server: ``python -m tests.e2e.dns --kubeconfig FILE --listen ADDRESS...``; prints ``ready``.

It answers for Services as Kubernetes' specification says (https://github.com/kubernetes/dns, docs/specification.md),
without any cache: each lookup reads the Service, and for a headless one its EndpointSlices, from the API server.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
import socketserver
import struct
import sys
import threading
import urllib.parse
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError

PORT = 53
#: Types of records (RFC 1035, 3596, 2782).
A, CNAME, AAAA, SRV = 1, 5, 28, 33
_INTERNET = 1
_TTL_SECONDS = 5
_NO_ERROR, _FORMAT_ERROR, _SERVER_FAILURE, _NO_NAME = 0, 1, 2, 3
_HEADER = struct.Struct("!6H")
# Response, authoritative; the bit of the query that requests recursion is repeated.
_ANSWER_FLAGS, _RECURSION_DESIRED = 0x8480, 0x0100
_LONGEST_DATAGRAM = 1232
_TRUNCATED = 0x0200
_LABEL = re.compile(r"[a-z0-9_]([-a-z0-9]{0,62})")


class Found(NamedTuple):
    """What a name resolves to: addresses, targets (name and port) of SRV records, or another name."""

    addresses: Sequence[str] = ()
    targets: Sequence[tuple[str, int]] = ()
    alias: str = ""


#: Returns what a name, in lower case and without the last dot, resolves to; None if there is no such name.
Lookup = Callable[[str], Optional[Found]]


def _encode_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def _record(name: str, kind: int, data: bytes) -> bytes:
    return _encode_name(name) + struct.pack("!HHIH", kind, _INTERNET, _TTL_SECONDS, len(data)) + data


def _question(query: bytes) -> tuple[str, int, int]:
    """Return name, type and end of the first question. Raises ValueError."""
    labels, place = [], _HEADER.size
    while True:
        length = query[place] if place < len(query) else 64
        if length > 63 or place + 1 + length > len(query):
            raise ValueError("a name that is not well-formed")
        place += 1
        if not length:
            break
        labels.append(query[place : place + length].decode("ascii"))
        place += length
    if place + 4 > len(query):
        raise ValueError("a question without type")
    return ".".join(labels), int(struct.unpack_from("!H", query, place)[0]), place + 4


def _records(name: str, kind: int, lookup: Lookup) -> Optional[list[bytes]]:
    """Return the records of a name, with those of the name it is an alias of; None if there is no such name."""
    found = lookup(name.lower())
    if found is None:
        return None
    records = []
    if found.alias:
        records.append(_record(name, CNAME, _encode_name(found.alias)))
        records += _records(found.alias, kind, lookup) or []
    for address in map(ipaddress.ip_address, found.addresses):
        if kind == (A if address.version == 4 else AAAA):
            records.append(_record(name, kind, address.packed))
    if kind == SRV:
        for target, port in found.targets:
            records.append(_record(name, kind, struct.pack("!3H", 0, 100, port) + _encode_name(target)))
    return records


def answer(query: bytes, lookup: Lookup, longest: int = 65535) -> bytes:
    """Return the answer to a query, cut off and marked as such where it is longer than ``longest`` bytes.

    Raises ValueError for bytes that are not a query.
    """
    if len(query) < _HEADER.size:
        raise ValueError("shorter than a header")
    number, flags, questions = _HEADER.unpack_from(query)[:3]
    flags = _ANSWER_FLAGS | flags & _RECURSION_DESIRED
    try:
        if questions != 1:
            raise ValueError("not one question")
        name, kind, end = _question(query)
    except ValueError:
        return _HEADER.pack(number, flags | _FORMAT_ERROR, 0, 0, 0, 0)
    question = query[_HEADER.size : end]
    try:
        # A name elsewhere does not exist, since there is no other server to ask.
        found = _records(name, kind, lookup)
        code, records = (_NO_NAME, []) if found is None else (_NO_ERROR, found)
    except ApiError as error:
        print(error, file=sys.stderr, flush=True)
        code, records = _SERVER_FAILURE, []
    body = b"".join(records)
    if _HEADER.size + len(question) + len(body) > longest:
        return _HEADER.pack(number, flags | _TRUNCATED | code, 1, 0, 0, 0) + question
    return _HEADER.pack(number, flags | code, 1, len(records), 0, 0) + question + body


class Services:
    """Looks up names of Services at the API server. Its :meth:`find` may be called by several threads."""

    def __init__(self, get: Callable[[str], Optional[dict[str, Any]]], domain: str) -> None:
        self._get = get
        self._suffix = f".svc.{domain}"

    def find(self, name: str) -> Optional[Found]:
        """Resolve a name: [HOST.]SERVICE.NAMESPACE or _PORT._PROTOCOL.SERVICE.NAMESPACE."""
        labels = name[: -len(self._suffix)].split(".") if name.endswith(self._suffix) else []
        if not 2 <= len(labels) <= 4 or not all(_LABEL.fullmatch(label) for label in labels):
            return None
        first, (service, namespace) = labels[:-2], labels[-2:]
        found = self._get(f"/api/v1/namespaces/{namespace}/services/{service}")
        if found is None:
            return None
        spec = found["spec"]
        if spec.get("type") == "ExternalName":
            return None if first else Found(alias=spec["externalName"].rstrip("."))
        if spec.get("clusterIP") == "None":
            return self._headless(namespace, service, first, bool(spec.get("publishNotReadyAddresses")))
        if not first:
            return Found(addresses=spec["clusterIPs"])
        target = f"{service}.{namespace}{self._suffix}"
        ports = [item["port"] for item in spec.get("ports", ()) if _is_port(item, first)]
        return Found(targets=[(target, port) for port in ports]) if ports else None

    def _headless(self, namespace: str, service: str, first: Sequence[str], unready: bool) -> Optional[Found]:
        selector = urllib.parse.quote(f"kubernetes.io/service-name={service}", safe="")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={selector}"
        addresses: list[str] = []
        targets: list[tuple[str, int]] = []
        for item in (self._get(path) or {"items": []})["items"]:
            ports = [port["port"] for port in item.get("ports") or () if len(first) == 2 and _is_port(port, first)]
            for endpoint in item.get("endpoints") or ():
                if not unready and endpoint.get("conditions", {}).get("ready") is False:
                    continue
                host = endpoint.get("hostname") or re.sub("[.:]", "-", endpoint["addresses"][0])
                if not first or [host] == list(first):
                    addresses += endpoint["addresses"]
                targets += [(f"{host}.{service}.{namespace}{self._suffix}", port) for port in ports]
        if first and not addresses and not targets:
            return None
        return Found(addresses=() if len(first) == 2 else addresses, targets=targets)


def _is_port(port: dict[str, Any], labels: Sequence[str]) -> bool:
    """Whether the labels ``_NAME._PROTOCOL`` name this port of a Service or an EndpointSlice."""
    return [f"_{port.get('name') or ''}", f"_{port.get('protocol', 'TCP').lower()}"] == list(labels)


class Reader:
    """Reads objects with one connection, one at a time."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = ApiClient(ApiConnection(kubeconfig=kubeconfig))
        self._lock = threading.Lock()

    def get(self, path: str) -> Optional[dict[str, Any]]:
        """Return an object or a list; None if it does not exist. Raises ApiError."""
        with self._lock:
            try:
                return dict(self._client.send("GET", path, None, f"read {path}"))
            except ApiStatusError as error:
                if error.code == 404:
                    return None
                raise


def serve(address: str, reply: Callable[[bytes, int], bytes]) -> None:
    """Answer at an address over UDP and TCP, in threads. Raises OSError."""

    class Datagram(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sock = self.request
            sock.sendto(reply(data, _LONGEST_DATAGRAM), self.client_address)

    class Stream(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            while len(head := self.rfile.read(2)) == 2:
                data = reply(self.rfile.read(int.from_bytes(head, "big")), 65535)
                self.wfile.write(len(data).to_bytes(2, "big") + data)

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    options = {"address_family": family, "allow_reuse_address": True, "daemon_threads": True}
    for base, handler in ((socketserver.ThreadingUDPServer, Datagram), (socketserver.ThreadingTCPServer, Stream)):
        server = type("Server", (base,), options)((address, PORT), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.dns", description="Serves the names of a cluster.")
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--domain", default="cluster.local")
    parser.add_argument("--listen", action="append", required=True, metavar="ADDRESS")
    options = parser.parse_args(arguments)
    services = Services(Reader(options.kubeconfig).get, options.domain)
    for address in options.listen:
        serve(address, lambda query, longest: answer(query, services.find, longest))
    print("ready", flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
