# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file format of a saved state: a header line of JSON, and a second line with the state, compressed with gzip.

The header contains the format, its version and the SHA-256 of the second line. Reading a file that is truncated,
modified, or of another version raises a one-line error.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import re
from typing import Any, NamedTuple

from ..base.addresses import FAMILIES, canonical_address
from ..base.errors import HistoryError, errors_as
from ..base.regular_files import gunzip, parse_json
from ..kernel.nftables.raw.reading import RawChain, RawKey, RawSet, RawTable, RawValue, StatefulKey
from ..kernel.parameters.sysctl_profile import KEYS
from ..kernel.xtables.saved import BUILTIN, CHAIN, SavedChainKey
from ..rendering.ipvs import model as ipvs
from ..rendering.nftables.objects import ObjectKey
from .state import ChainsState, NodeState

FORMAT = "kubenode-proxy node state"
VERSION = 1
#: Limits in bytes of a file, and of its uncompressed content: 100,000 endpoints take about 60 MB.
MOST_BYTES, _MOST_TEXT = 64 << 20, 512 << 20
_LEVEL = 4
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_KINDS = {"list": "a list", "dict": "a mapping", "str": "text", "int": "a number", "bool": "true or false"}


class StateRecord(NamedTuple):
    """A saved state with its metadata.

    ``number`` identifies it; ``created`` is an RFC 3339 time in UTC; ``reason`` is the kind of change before which it
    was saved; ``kernel`` is the kernel's release, ``engine`` the hash of the engine, ``boot`` the kernel's boot ID.
    """

    number: int
    created: str
    reason: str
    kernel: str
    engine: str
    boot: str
    state: NodeState


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _encode_nftables(table: RawTable) -> list[list[Any]]:
    return [_nft_entry(key, value) for key, value in table.items()]


def _nft_entry(key: RawKey, value: RawValue) -> list[Any]:
    if isinstance(value, RawChain):
        return [list(key), _text(value.definition), [_text(rule) for rule in value.rules]]
    if isinstance(value, RawSet):
        return [list(key), _text(value.definition), [_text(element) for element in value.elements]]
    return [list(key), _text(value), []]


def encode_state(state: NodeState) -> dict[str, Any]:
    """Return a state as JSON values."""
    policy = state.network_policy
    return {
        "chains": [
            {
                "family": item.family,
                "variant": item.variant,
                "places": list(item.places),
                "chains": [[*key, list(rules)] for key, rules in item.chains.items()],
            }
            for item in state.chains
        ],
        "nftables": {family: _encode_nftables(table) for family, table in state.nftables.items()},
        "ipvs_tables": {family: _encode_nftables(table) for family, table in state.ipvs_tables.items()},
        **({} if policy is None else {"network_policy": _encode_nftables(policy)}),
        "sets": [[name, *value] for name, value in state.sets.items()],
        "set_elements": [list(key) for key in state.set_elements],
        "virtual_servers": [[*key, *value] for key, value in state.virtual_servers.items()],
        "real_servers": [[*key.server, key.ip, key.port, *value] for key, value in state.real_servers.items()],
        "devices": dict(state.devices),
        "addresses": list(state.addresses),
        "timeouts": dict(state.timeouts),
        "sysctls": dict(state.sysctls),
        "exclude_cidrs": list(state.exclude_cidrs),
        **({"policies_standalone": True} if state.policies_standalone else {}),
    }


class _Reader:
    """Reads typed values from a JSON document; errors name the invalid field."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self.field = ""

    def fail(self, wanted: str) -> HistoryError:
        return HistoryError(f"field {self.field}: is not {wanted}")

    def get(self, name: str, kind: type) -> Any:
        """Return a field of the document, which must be of the given type. Raises HistoryError."""
        self.field = name
        if not isinstance(self._document, dict) or not isinstance(self._document.get(name), kind):
            raise self.fail(_KINDS.get(kind.__name__, kind.__name__))
        return self._document[name]

    def row(self, row: Any, kinds: tuple[type, ...]) -> list[Any]:
        """Return a list of values of the given types, with no number negative. Raises HistoryError."""
        if not isinstance(row, list) or len(row) != len(kinds):
            raise self.fail(f"a list of entries with {len(kinds)} values each")
        for value, kind in zip(row, kinds):
            negative = isinstance(value, int) and (isinstance(value, bool) or value < 0)
            if not isinstance(value, kind) or negative:
                raise self.fail(f"a list of entries: {value!r} is not {_KINDS[kind.__name__]}")
            if isinstance(value, str):
                self.line(value)
        return row

    def rows(self, name: str, kinds: tuple[type, ...]) -> list[list[Any]]:
        """Return a field with a list of rows, each with values of the given types. Raises HistoryError."""
        return [self.row(row, kinds) for row in self.get(name, list)]

    def line(self, value: Any) -> str:
        """Return text without line breaks and NUL. Raises HistoryError."""
        if not isinstance(value, str) or "\n" in value or "\r" in value or "\0" in value:
            raise self.fail(f"one line of text each: {value!r}")
        return value

    def address(self, value: str) -> str:
        if canonical_address(value) != value:
            raise self.fail(f"a list of addresses: {value!r}")
        return value

    def raw(self, value: Any) -> bytes:
        """Return the bytes encoded in Base64. Raises HistoryError."""
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise self.fail("in Base64") from None


def _decode_chains(reader: _Reader, document: Any) -> ChainsState:
    inner = _Reader(document)
    chains: dict[SavedChainKey, tuple[str, ...]] = {}
    family, variant = inner.get("family", str), inner.get("variant", str)
    places = tuple(map(inner.line, inner.get("places", list)))
    for kind, table, chain, rules in inner.rows("chains", (str, str, str, list)):
        if kind not in (CHAIN, BUILTIN) or not chain or not table or " " in table + chain:
            raise inner.fail(f"a list of chains: {[kind, table, chain]!r}")
        # A comment in a rule of another program may contain a line break; such rules are never written.
        if not all(isinstance(rule, str) for rule in rules):
            raise inner.fail("a list of chains with rules as text")
        chains[SavedChainKey(kind, table, chain)] = tuple(rules)
    if family not in FAMILIES:
        raise reader.fail(f"a list of families: {family!r}")
    return ChainsState(family, variant, places, chains)


def _decode_nftables(reader: _Reader, rows: Any) -> RawTable:
    table: RawTable = {}
    if not isinstance(rows, list):
        raise reader.fail("a list of objects for each table")
    for row in rows:
        key, definition, parts = reader.row(row, (list, str, list))
        raw = reader.raw(definition)
        inner = tuple(map(reader.raw, parts))
        if key[:1] == ["object"]:
            table[StatefulKey(*reader.row(key, (str, int, str)))] = raw
            continue
        if key[:1] not in (["table"], ["chain"], ["set"]):
            raise reader.fail(f"a list of objects: {key!r}")
        object_key = ObjectKey(*reader.row(key, (str, str)))
        value: RawValue = raw
        if object_key.kind != "table":
            value = RawChain(raw, inner) if object_key.kind == "chain" else RawSet(raw, inner)
        table[object_key] = value
    return table


def _decode_tables(reader: _Reader, name: str) -> dict[str, RawTable]:
    """Return the tables by family in a field."""
    found = reader.get(name, dict).items()
    return {family: _decode_nftables(reader, rows) for family, rows in found if family in FAMILIES}


def _decode_servers(reader: _Reader) -> dict[ipvs.VirtualServerKey, ipvs.VirtualServer]:
    return {
        ipvs.VirtualServerKey(protocol, reader.address(address), port): ipvs.VirtualServer(*settings)
        for protocol, address, port, *settings in reader.rows("virtual_servers", (str, str, int, str, int, int, int))
    }


def _decode_real_servers(reader: _Reader) -> dict[ipvs.RealServerKey, ipvs.RealServer]:
    servers = {}
    for protocol, address, port, *real in reader.rows("real_servers", (str, str, int, str, int, int, str)):
        server = ipvs.VirtualServerKey(protocol, reader.address(address), port)
        servers[ipvs.RealServerKey(server, reader.address(real[0]), real[1])] = ipvs.RealServer(*real[2:])
    return servers


def _decode_values(reader: _Reader, name: str, kind: type) -> dict[str, Any]:
    """Return the mapping to text or numbers in a field."""
    return {key: reader.row([value], (kind,))[0] for key, value in reader.get(name, dict).items()}


def _decode_sysctls(reader: _Reader) -> dict[str, str]:
    """Return the kernel parameters. Raises HistoryError for other values than numbers, and for any that no mode sets.

    Other kernel parameters can start programs.
    """
    values = _decode_values(reader, "sysctls", str)
    for key, value in values.items():
        if key not in KEYS:
            raise reader.fail(f"a mapping of kernel parameters that a service proxy sets: {key!r}")
        if not _NUMBER.match(value):
            raise reader.fail(f"a mapping to numbers: {key}: {value!r}")
    return values


def decode_state(document: Any) -> NodeState:
    """Return the state in JSON values. Raises HistoryError, naming the field."""
    reader = _Reader(document)
    policy = None
    if "network_policy" in document:
        policy = _decode_nftables(reader, reader.get("network_policy", list))
    return NodeState(
        chains=tuple(_decode_chains(reader, item) for item in reader.get("chains", list)),
        nftables=_decode_tables(reader, "nftables"),
        # States saved by versions without this table do not have the field.
        ipvs_tables=_decode_tables(reader, "ipvs_tables") if "ipvs_tables" in document else {},
        network_policy=policy,
        sets={name: ipvs.SetDefinition(*definition) for name, *definition in reader.rows("sets", (str, str, str, int))},
        set_elements={ipvs.SetElementKey(*row): True for row in reader.rows("set_elements", (str, str))},
        virtual_servers=_decode_servers(reader),
        real_servers=_decode_real_servers(reader),
        devices=_decode_values(reader, "devices", str),
        addresses={reader.address(reader.line(value)): True for value in reader.get("addresses", list)},
        timeouts=_decode_values(reader, "timeouts", int),
        sysctls=_decode_sysctls(reader),
        exclude_cidrs=tuple(map(reader.line, reader.get("exclude_cidrs", list))),
        policies_standalone="policies_standalone" in document and reader.get("policies_standalone", bool),
    )


def pack_record(record: StateRecord) -> bytes:
    """Return the file content of a record."""
    document = {**record._asdict(), "state": encode_state(record.state)}
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body).hexdigest()}
    return gzip.compress(json.dumps(head).encode() + b"\n" + body, _LEVEL, mtime=0)


def unpack_record(content: bytes) -> StateRecord:
    """Return the record in the content of a file. Raises HistoryError, naming the fault."""
    with errors_as(HistoryError, "not a saved state, or truncated", ValueError):
        head_line, _newline, body = gunzip(content, _MOST_TEXT).partition(b"\n")
        head = parse_json(head_line)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise HistoryError("not a saved state of kubenode-proxy")
    if head.get("version") != VERSION:
        raise HistoryError(f"its version is {head.get('version')!r}, this engine reads version {VERSION}")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise HistoryError("its content does not match its checksum")
    with errors_as(HistoryError, "its content is not JSON", ValueError):
        document = parse_json(body)
    reader = _Reader(document)
    words = {name: reader.line(reader.get(name, str)) for name in ("created", "reason", "kernel", "engine", "boot")}
    return StateRecord(number=reader.get("number", int), state=decode_state(reader.get("state", dict)), **words)
