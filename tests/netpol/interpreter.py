# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Execute the rules of a desired table on a packet as the kernel would (linux/netfilter/nf_tables.h).

It implements expressions, registers, sets and hooks, and knows nothing of policies or of the table's purpose.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from .oracle import Packet

_L4 = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1}
_ICMPV6 = 58
_NEW = 8
_LOCAL, _UNICAST = 2, 1
_SIZES = {"ifname": 16, "ipv4_addr": 4, "ipv6_addr": 16, "inet_proto": 4, "inet_service": 4, "classid": 4}


class Traversal(NamedTuple):
    """A packet at one hook: headers, input interface (0: none), and the results of routing lookups of its ends.

    ``routed_back``: packets to its source would leave through that interface. ``link``: the header of a frame.
    """

    family: int
    network: bytes
    transport: bytes
    protocol: int
    interface: int
    interface_name: str
    local_source: bool
    local_destination: bool
    routed_back: bool
    priority: int
    link: bytes = b""


class _Verdict(Exception):
    pass


class Interpreter:
    """A table, ready to evaluate packets."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        self._chains = {key[1]: value for key, value in table.items() if key[0] == "chain"}
        self._sets = {key[1]: value for key, value in table.items() if key[0] == "set"}
        self._elements: dict[str, dict[bytes, Any]] = {name: {} for name in self._sets}
        for key, value in table.items():
            if key[0] == "element":
                assert key[2] not in self._elements[key[1]]
                self._elements[key[1]][key[2]] = value
        self._ranges = {
            name: list(self._elements[name].items()) for name, value in self._sets.items() if value.flags & 4
        }

    def allowed(
        self,
        packet: Packet,
        node_addresses: frozenset[str] = frozenset(),
        priority: int = 0,
        interface: str = "eth0",
        *,
        routed_back: bool = True,
    ) -> bool:
        """Return whether a packet reaches its destination through all hooks that it passes.

        A packet with a priority (a DSCP value, for example) must get the same verdict as any other. ``routed_back``:
        packets to its source would leave through the interface.
        """
        outside = self._arriving(packet, node_addresses, priority, interface, routed_back)
        hooks = ["postrouting"] if packet.from_node else ["prerouting", "input" if packet.to_node else "postrouting"]
        return all(self._hook(hook, outside) for hook in hooks)

    def frame_allowed(self, packet: Packet, port: str) -> bool:
        """Return whether the frame of a packet that comes from the port of a bridge is passed on by its table."""
        arriving = self._arriving(packet, frozenset(), 0, port, True)
        kind = 0x0800 if arriving.family == 2 else 0x86DD
        return self._hook("prerouting", arriving._replace(link=bytes(12) + struct.pack("!H", kind)))

    @staticmethod
    def _arriving(
        packet: Packet, node_addresses: frozenset[str], priority: int, interface: str, routed_back: bool
    ) -> Traversal:
        """Return a packet where it arrives."""
        source, destination = map(ipaddress.ip_address, (packet.source, packet.destination))
        four = source.version == 4
        header = bytearray(20 if four else 40)
        start = 12 if four else 8
        header[start : start + len(source.packed)] = source.packed
        header[start + len(source.packed) : start + 2 * len(source.packed)] = destination.packed
        protocol = _L4[packet.protocol]
        transport = struct.pack("!HHIIBBHHH", 33333, packet.port, 1, 0, 0x50, 0x02, 0, 0, 0)
        if packet.protocol == "icmp":
            protocol, kind = (1, 8) if four else (_ICMPV6, 128)
            # The bytes in place of ports must not matter.
            transport = bytes((kind, 0)) + struct.pack("!H", 80) + bytes(16)
        elif packet.protocol == "sctp":
            transport = struct.pack("!HHII", 33333, packet.port, 0, 0)
        common = (2 if four else 10, bytes(header), transport, protocol)
        local = packet.from_node or packet.source in node_addresses
        number, device = (0, "") if packet.from_node else (7, interface)
        to_node = packet.to_node or packet.destination in node_addresses
        return Traversal(*common, number, device, local, to_node, routed_back, priority)

    def _hook(self, hook: str, packet: Traversal) -> bool:
        bases = [(value.base.priority, name) for name, value in self._chains.items() if value.base is not None]
        for _priority, name in sorted(each for each in bases if self._chains[each[1]].base.hook == hook):
            run = _Run(self, packet)
            verdict = run.chain(name)
            if verdict == "drop":
                return False
            # A packet without a verdict keeps its priority; one with a verdict must not keep a value of ours.
            assert run.priority in (packet.priority, 0), hex(run.priority)
        return True

    def find(self, name: str, key: bytes) -> Any:
        """Return the value of a set's element, or None."""
        definition = self._sets[name]
        if name not in self._ranges:
            return self._elements[name].get(key)
        half = len(key)
        found = [value for both, value in self._ranges[name] if self._within(definition, both, key, half)]
        assert len(found) <= 1, f"ranges of {name} overlap"
        return found[0] if found else None

    @staticmethod
    def _within(definition: Any, both: bytes, key: bytes, half: int) -> bool:
        position = 0
        for part in definition.key:
            end = position + _SIZES[part]
            if not both[position:end] <= key[position:end] <= both[half + position : half + end]:
                return False
            position = end
        return True

    def key_size(self, name: str) -> int:
        """Return the number of bytes of a set's key."""
        return sum(_SIZES[part] for part in self._sets[name].key)

    def rules(self, chain: str) -> Any:
        """Return the rules of a chain."""
        return self._chains[chain].rules


def _word(register: int) -> int:
    return register - 8 if register >= 8 else (register - 1) * 4


class _Run:
    """The evaluation of one packet in one base chain."""

    def __init__(self, table: Interpreter, packet: Traversal) -> None:
        self._table = table
        self._packet = packet
        self._registers = bytearray(64)
        self.priority = packet.priority

    def chain(self, name: str) -> Optional[str]:
        """Return the verdict of a chain: accept, drop, or None if it ends without one."""
        for rule in self._table.rules(name):
            verdict = self._rule(rule)
            if verdict is None:
                continue
            word, _space, target = verdict.partition(" ")
            if word in ("accept", "drop"):
                return str(word)
            if word == "return":
                return None
            deeper = self.chain(target)
            if deeper is not None or word == "goto":
                return deeper
        return None

    def _rule(self, rule: Any) -> Optional[str]:
        for part in rule.expressions:
            result = getattr(self, f"_{part.name}")(part)
            if result is False:
                return None
            if isinstance(result, str):
                return result
        return None

    def _put(self, register: int, data: bytes) -> None:
        start = 4 * _word(register)
        padded = data.ljust((len(data) + 3) & ~3, b"\0")
        self._registers[start : start + len(padded)] = padded

    def _at(self, register: int, size: int) -> bytes:
        start = 4 * _word(register)
        return bytes(self._registers[start : start + size])

    def _meta(self, part: Any) -> None:
        key, packet = part.get(2), self._packet
        if part.get(3):
            assert key == 2
            self.priority = struct.unpack("=I", self._at(part.get(3), 4))[0]
            return
        data = {
            2: struct.pack("=I", self.priority),
            4: struct.pack("=I", packet.interface),
            6: packet.interface_name.encode().ljust(16, b"\0"),
            15: bytes((packet.family,)),
            16: bytes((packet.protocol,)),
        }[key]
        self._put(part.get(1), data)

    def _payload(self, part: Any) -> bool:
        header = (self._packet.link, self._packet.network, self._packet.transport)[part.get(2)]
        data = header[part.get(3) : part.get(3) + part.get(4)]
        if len(data) < part.get(4):
            return False
        self._put(part.get(1), data)
        return True

    def _ct(self, part: Any) -> None:
        assert part.get(2) == 0
        self._put(part.get(1), struct.pack("=I", _NEW))

    def _fib(self, part: Any) -> None:
        result, flags = part.get(2), part.get(3)
        if result == 3:
            is_local = {1: self._packet.local_source, 2: self._packet.local_destination}[flags]
            self._put(part.get(1), struct.pack("=I", _LOCAL if is_local else _UNICAST))
        else:
            assert (result, flags) == (1, 0x29), "the interface to the source, whether there is one"
            found = self._packet.routed_back and not self._packet.local_source
            self._put(part.get(1), struct.pack("=I", found))

    def _cmp(self, part: Any) -> bool:
        data = part.get(3)
        held = self._at(part.get(1), len(data))
        return bool({0: held == data, 1: held != data, 3: held <= data, 5: held >= data}[part.get(2)])

    def _bitwise(self, part: Any) -> None:
        size = part.get(3)
        mask, xor = part.get(4), part.get(5)
        held = self._at(part.get(1), size)
        self._put(part.get(2), bytes(a & b ^ c for a, b, c in zip(held, mask, xor)))

    def _byteorder(self, part: Any) -> None:
        (value,) = struct.unpack("=I", self._at(part.get(1), 4))
        self._put(part.get(2), struct.pack("!I", value))

    def _lookup(self, part: Any) -> bool:
        name = part.get(1)
        found = self._table.find(name, self._at(part.get(2), self._table.key_size(name)))
        if part.get(5):
            return found is None
        if found is None:
            return False
        if part.get(3, None) is not None:
            self._put(part.get(3), found)
        return True

    def _immediate(self, part: Any) -> Optional[str]:
        if part.get(1) == 0:
            return str(part.get(2))
        self._put(part.get(1), part.get(2))
        return None

    @staticmethod
    def _limit(_part: Any) -> None:
        return None

    _log = _limit
