# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The contents of the table as values: keys and values of the one resource table of nftables mode.

===============================  ===============================================================================
key                              value
===============================  ===============================================================================
``TABLE_KEY``                    :class:`TableValue`
``ObjectKey("set", name)``       :class:`SetValue`, of a set or a map
``ObjectKey("chain", name)``     :class:`ChainValue`, with all its rules
``ElementKey("element", ...)``   ``True`` in a set, a verdict such as ``goto cluster-4`` or ``drop`` in a map
``ElementKey("list", ...)``      the endpoints behind one frontend: a tuple of packed data in the order of their
                                 index, or a :class:`SparseList`
===============================  ===============================================================================

In a set of ranges the key of an element is the first key of the range followed by the last one. Keys and data of
elements are bytes as the kernel keeps them in its registers: every part of a concatenation is padded
to four bytes; addresses and ports are in network order, an index is in the order of the machine.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any, Callable, Mapping, NamedTuple, Optional, Union

from ...resources import Kind

TABLE_NAME = "kube-proxy"
#: Name of the resource table of nftables mode.
RESOURCE = Kind.TABLE_OBJECTS

ADDRESS_TYPES = {"IPv4": "ipv4_addr", "IPv6": "ipv6_addr"}
PROTOCOL = "inet_proto"
PORT = "inet_service"
#: The index of an endpoint in its list: the result of ``numgen``.
INDEX = "integer"
_LIST_KEY_END = (PROTOCOL, PORT, INDEX)
#: ``meta priority``, in the order of the machine.
CLASSID = "classid"
#: The name of an interface, padded with zeros.
INTERFACE = "ifname"
VERDICT = "verdict"
#: The direction of a packet in its connection: of the first packet (0), or of its answers (1).
DIRECTION = "ct_dir"
ORIGINAL, REPLY = 0, 1

#: The nft program's number of a data type, and the bytes that it occupies in registers.
DATA_TYPES: dict[str, tuple[int, int]] = {
    INDEX: (4, 4),
    "ipv4_addr": (7, 4),
    "ipv6_addr": (8, 16),
    PROTOCOL: (12, 4),
    PORT: (13, 4),
    CLASSID: (23, 4),
    DIRECTION: (27, 4),
    INTERFACE: (41, 16),
}
DATA_TYPE_NAMES = {number: name for name, (number, _size) in DATA_TYPES.items()}

TABLE_DORMANT = 0x1
TABLE_OWNER = 0x2
TABLE_PERSIST = 0x4

SET_ANONYMOUS = 0x1
SET_INTERVAL = 0x4
SET_MAP = 0x8
SET_TIMEOUT = 0x10
SET_EVAL = 0x20
SET_CONCAT = 0x80


PROTOCOL_NUMBERS = {"tcp": 6, "udp": 17, "sctp": 132}
PROTOCOL_NAMES = {number: name for name, number in PROTOCOL_NUMBERS.items()}


class ObjectKey(NamedTuple):
    """The key of the table, a set or map, or a chain. ``kind``: table, set or chain."""

    kind: str
    name: str


class ElementKey(NamedTuple):
    """The key of an element. ``kind``: element, or list for all elements of one frontend in a map of endpoints.

    ``name``: of the set or map. ``key``: as in registers, without the index in a list.
    """

    kind: str
    name: str
    key: bytes


Key = Union[ObjectKey, ElementKey]


#: The most elements of a dynamic set for which no size was given; the kernel sets it when a rule uses the set
#: (``nft_dynset_init``).
DEFAULT_DYNAMIC_SIZE = 65535


class TableValue(NamedTuple):
    """The table itself. ``flags``: those of the kernel, 0 in every desired table.

    While a table is dormant, none of its hooks is called. TABLE_PERSIST alone counts as 0: no program can change it,
    and it has no effect on packets.
    """

    flags: int = 0


class SetValue(NamedTuple):
    """A set, or a map if ``data`` is not None: type names of the parts of its key and of its data.

    ``dynamic``: elements are added by the packet path and managed by the kernel alone; ``timeout`` in milliseconds;
    ``size``: most elements of a dynamic set. ``flags``: any other flags of the kernel. ``counted``: each element has a
    counter, which is not part of its value.
    """

    key: tuple[str, ...]
    data: Optional[tuple[str, ...]] = None
    dynamic: bool = False
    timeout: int = 0
    size: int = 0
    flags: int = 0
    counted: bool = False

    @property
    def is_interval(self) -> bool:
        """Return whether elements are ranges; their keys in the resource table are first and last key, joined."""
        return bool(self.flags & SET_INTERVAL)

    @property
    def is_list(self) -> bool:
        """Return whether the map has a frontend and an index as key and an endpoint as data.

        A map of another program may have any key.
        """
        return self.key[-3:] == _LIST_KEY_END and self.data is not None and self.data[-1:] == (PORT,)


class Part(Enum):
    """What the elements of a set do for packets to a frontend; it decides when they change in a large change."""

    #: They decide what becomes of the packets, so all those of a frontend change together.
    SELECTS = "selects"
    #: As SELECTS, of packets that the chains of a frontend leave or never reach: they change together with such chains.
    REFUSES = "refuses"
    #: They matter to packets that others select: added before and removed after those.
    HELPS = "helps"


class SetRole(NamedTuple):
    """The part of a set, and how many bytes of its keys the elements that change together have in common."""

    part: Part = Part.SELECTS
    common_bytes: int = 1 << 30


def owner_of(chain: str) -> str:
    """Return the end of a chain's name, which the chains of one ServicePort that lead to each other have in common."""
    return chain.partition("-")[2]


class TableIdentity(NamedTuple):
    """Name and comment of a table, and its sets of ranges by name (see :attr:`SetValue.is_interval`).

    ``role``: returns the role of a set by family and name. ``common_chains``: chains without a hook that packets to
    all frontends traverse. ``restricting_chains``: chains with a hook that only refuse packets.
    """

    name: str
    comment: str
    intervals: Mapping[str, SetValue] = {}
    role: Callable[[str, str], SetRole] = lambda _family, _name: SetRole()
    common_chains: frozenset[str] = frozenset()
    restricting_chains: frozenset[str] = frozenset()

    @property
    def key(self) -> ObjectKey:
        """Return the key of the table itself in its resource table."""
        return ObjectKey("table", self.name)


TABLE_KEY = ObjectKey("table", TABLE_NAME)


class Expression(NamedTuple):
    """One expression of a rule: its name and attributes, (number, value) in the order of their numbers.

    A value is a number (registers included), bytes (data in a register), or text (a name or a verdict).
    """

    name: str
    attributes: tuple[tuple[int, Union[int, bytes, str]], ...]

    def get(self, number: int, default: Any = 0) -> Any:
        """Return the value of an attribute, or ``default`` if it is absent."""
        for found, value in self.attributes:
            if found == number:
                return value
        return default


class Rule(NamedTuple):
    """One rule: its expressions and its comment."""

    expressions: tuple[Expression, ...]
    comment: str = ""


class BaseHook(NamedTuple):
    """The hook of a base chain: type (filter, nat), hook name, priority; ``policy`` is accept (1) or drop (0)."""

    type: str
    hook: str
    priority: int
    policy: int = 1


class ChainValue(NamedTuple):
    """A chain and its rules; ``base`` is None for a chain that is not attached to a hook."""

    rules: tuple[Rule, ...]
    base: Optional[BaseHook] = None


class SparseList(NamedTuple):
    """An endpoint list with missing indices, as pairs (index, data); only if another program edited the map."""

    items: tuple[tuple[int, bytes], ...]


#: The value of an element of a set or a map: True, a verdict, or data of a map that another program wrote.
ElementValue = Union[bool, str, bytes]
ListValue = Union[tuple[bytes, ...], SparseList]
Value = Union[ElementValue, ListValue, TableValue, SetValue, ChainValue]

HOOKS = ("prerouting", "input", "forward", "output", "postrouting")

_INDEX = struct.Struct("=I")


def index_bytes(index: int) -> bytes:
    """Return an index as stored in a register."""
    return _INDEX.pack(index)


def index_of(raw: bytes) -> int:
    """Return the index stored in a register."""
    return int(_INDEX.unpack(raw)[0])


def list_items(value: ListValue) -> list[tuple[int, bytes]]:
    """Return the (index, data) pairs of the value of a list."""
    return list(value.items) if isinstance(value, SparseList) else list(enumerate(value))


def list_value(items: dict[int, bytes]) -> ListValue:
    """Return the value of a list from its elements."""
    if all(index in items for index in range(len(items))):
        return tuple([items[index] for index in range(len(items))])
    return SparseList(tuple(sorted(items.items())))


def key_length(parts: tuple[str, ...]) -> int:
    """Return the size in bytes of a concatenation of such parts."""
    return sum(DATA_TYPES[part][1] for part in parts)
