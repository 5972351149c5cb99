# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The comparison of kube-proxy's configuration with that of a host that takes its Services over, field by field.

Only fields that change traffic count, by their rows in ``fields``. The mode and the name of the node are apart: the
former is often changed on purpose, and the latter differs from node to node.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple

from ..base.mode_names import AUTO, IPTABLES, IPVS, NFTABLES
from ..cluster.fields import shown
from .feature_gates import ALLOW_SERVICE_EXTERNAL_IPS
from .field import HONOURED, Field, given_value, value_of
from .fields import FIELDS
from .load import load
from .model import KubeProxyConfiguration

_APART = ("mode", "hostnameOverride")
# The block whose masqueradeAll counts in kube-proxy's mode; that of iptables in others.
_BLOCK_OF_MODE = {NFTABLES: NFTABLES}
_MASQUERADE_ALL = "masqueradeAll"
_GATE = f"featureGates.{ALLOW_SERVICE_EXTERNAL_IPS}"

Source = Mapping[str, Any]


class Difference(NamedTuple):
    """A field that kube-proxy has another value of. ``chosen``: the host's configuration sets it, so it is wanted."""

    field: str
    theirs: str
    own: str
    chosen: bool

    def __str__(self) -> str:
        return f"{self.field}: kube-proxy has {self.theirs}, the host {self.own}"


class _Pair(NamedTuple):
    """A field of a host, and the place and value of the same in kube-proxy's configuration."""

    name: str
    their_name: str
    theirs: Any
    own: Any


def differences(theirs: Source, own: Source) -> list[Difference]:
    """Return the fields that change traffic in the host's mode and that differ. Raises ConfigurationError.

    In the mode ``auto``, which is chosen on the host, all fields count.
    """
    automatic = own.get("mode") == AUTO
    loaded = load({**own, "mode": None} if automatic else own).configuration
    return [
        Difference(
            pair.name,
            _text(given_value(theirs, pair.their_name)),
            _text(given_value(own, pair.name)),
            given_value(own, pair.name) is not None,
        )
        for pair in _pairs(load(theirs).configuration, loaded._replace(mode=AUTO) if automatic else loaded)
        if pair.theirs != pair.own
    ]


def adopted(theirs: Source) -> dict[str, Any]:
    """Return what a host must have below its own fields to serve as kube-proxy did. Raises ConfigurationError."""
    configuration = load(theirs).configuration
    found: dict[str, Any] = {}
    default = KubeProxyConfiguration()
    for mode in (IPTABLES, IPVS, NFTABLES):
        for pair in _pairs(configuration, default._replace(mode=mode)):
            if pair.theirs != pair.own:
                *blocks, leaf = pair.name.split(".")
                place = found
                for block in blocks:
                    place = place.setdefault(block, {})
                place[leaf] = given_value(theirs, pair.their_name)
    return {**found, "mode": configuration.mode} if given_value(theirs, "mode") else found


def _pairs(theirs: KubeProxyConfiguration, own: KubeProxyConfiguration) -> Iterator[_Pair]:
    for field in FIELDS:
        if field.effect == HONOURED and field.name not in _APART and _matters(field, own.mode):
            name, attribute = _theirs(field, theirs.mode)
            yield _Pair(field.name, name, value_of(theirs, attribute), value_of(own, field.attribute))
    gate = ALLOW_SERVICE_EXTERNAL_IPS
    yield _Pair(_GATE, _GATE, theirs.gate(gate), own.gate(gate))


def _matters(field: Field, mode: str) -> bool:
    modes = field.modes.split(", ")
    return "all" in modes or mode in modes or mode == AUTO


def _theirs(field: Field, mode: str) -> tuple[str, str]:
    """Return name and attribute of what a field is in kube-proxy's mode, which may be in the block of that mode."""
    block, _dot, leaf = field.name.partition(".")
    if leaf != _MASQUERADE_ALL:
        return field.name, field.attribute
    other = _BLOCK_OF_MODE.get(mode, IPTABLES)
    return f"{other}.{leaf}", field.attribute.replace(block, other, 1)


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return "none" if value is None else value if isinstance(value, str) and value else shown(value)
