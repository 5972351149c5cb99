# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the host that listen at a loopback address, at a port that is refused there as a node port (KEP-6032)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import Iterator, Mapping, NamedTuple

from ..base.addresses import FAMILIES, IPV4, IPV6, address_and_port, canonical_address, is_loopback
from ..kernel import facts
from .findings import LOCALHOST_NODE_PORT, WARNING, Finding

#: The node ports that are refused: family, protocol in lower case and port, and the Service port that has it.
RefusedPorts = Mapping[tuple[str, str, int], str]

#: The state of a socket that listens, by protocol, as the kernel shows it (net/tcp_states.h).
_LISTENING = {"tcp": "0A", "udp": "07"}
_INODE = re.compile(r"socket:\[(\d+)\]")


class _Socket(NamedTuple):
    protocol: str
    address: str
    port: int
    inode: str

    @property
    def families(self) -> tuple[str, ...]:
        """Return the families of which it gets what arrives at a loopback address."""
        if self.address in ("0.0.0.0", "::"):
            return (IPV4,) if self.address == "0.0.0.0" else FAMILIES
        return (IPV6 if ":" in self.address else IPV4,) if is_loopback(self.address) else ()


def _sockets(root: str) -> Iterator[_Socket]:
    """Yield the sockets that listen in the network namespace of the calling thread."""
    for protocol, state in _LISTENING.items():
        for suffix, family in (("", socket.AF_INET), ("6", socket.AF_INET6)):
            text = facts.read_text(f"{root}/proc/thread-self/net/{protocol}{suffix}") or ""
            for words in map(str.split, text.splitlines()[1:]):
                if len(words) > 9 and words[3] == state:
                    address, _colon, port = words[1].partition(":")
                    yield _Socket(protocol, _address(family, address), int(port, 16), words[9])


def _address(family: int, text: str) -> str:
    """Return an address of which the kernel shows each word as a number in the order of the machine."""
    raw = b"".join(
        socket.htonl(int(text[start : start + 8], 16)).to_bytes(4, "big") for start in range(0, len(text), 8)
    )
    found = socket.inet_ntop(family, raw)
    return canonical_address(found) or found


def _programs(inodes: Mapping[str, _Socket], root: str) -> dict[str, str]:
    """Return the program and process that has each socket, of those whose files may be read."""
    found: dict[str, str] = {}
    for number in filter(str.isdecimal, os.listdir(f"{root}/proc")):
        # The process has ended, or is another user's.
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"{root}/proc/{number}/fd"):
                match = _INODE.fullmatch(os.readlink(entry.path))
                if match is not None and match[1] in inodes:
                    name = (facts.read_text(f"{root}/proc/{number}/comm") or "a program").strip()
                    found.setdefault(match[1], f"{name} (process {number})")
    return found


def localhost_findings(refused: RefusedPorts, root: str = "") -> list[Finding]:
    """Return a warning for each socket of another program that gets no more connections at loopback addresses."""
    if not refused:
        return []
    concerned: dict[str, _Socket] = {}
    owners: dict[str, str] = {}
    for item in _sockets(root):
        for family in item.families:
            owner = refused.get((family, item.protocol, item.port))
            if owner is not None:
                concerned[item.inode], owners[item.inode] = item, owner
    programs = _programs(concerned, root) if concerned else {}
    return [
        Finding(
            LOCALHOST_NODE_PORT,
            WARNING,
            f"{programs.get(inode, 'a program')} listens at {address_and_port(item.address, item.port)}"
            f" ({item.protocol.upper()}), which is refused at loopback addresses: Service {owners[inode]} has that"
            " node port",
            "use another port, or set featureGates.KubeProxyNFTablesLocalhostNodePorts to false",
        )
        for inode, item in concerned.items()
    ]
