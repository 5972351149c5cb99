# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How one resource holds two tables of network policies: keys of the table of ports of bridges have a prefix."""

from __future__ import annotations

from typing import Any, Callable, Mapping, TypeVar

from ...resources import Change
from ..nftables.objects import TableIdentity
from .sets import TABLE_COMMENT, TABLE_NAME

BRIDGE = "bridge"
#: The nft program accepts no name that contains it.
PREFIX = f"{BRIDGE}/"
TABLE = TableIdentity(TABLE_NAME, TABLE_COMMENT)

K = TypeVar("K", bound=Any)
V = TypeVar("V")


def prefixed(key: K) -> K:
    """Return the key that an object of the table of ports has among those of the table of policies."""
    renamed: K = key._replace(name=PREFIX + key.name)
    return renamed


def is_bridged(key: Any) -> bool:
    """Return whether a key is of the table of ports."""
    return bool(key.name.startswith(PREFIX))


def plain(key: K) -> K:
    """Return the key that an object of the table of ports has in its own table."""
    renamed: K = key._replace(name=key.name[len(PREFIX) :])
    return renamed


def of_ports(change: Change[K, V]) -> Change[K, V]:
    """Return the part of a change that concerns the table of ports, with the keys of that table."""
    return _part(change, lambda table: {plain(key): value for key, value in table.items() if is_bridged(key)})


def of_policies(change: Change[K, V]) -> Change[K, V]:
    """Return the part of a change that concerns the table of policies."""
    return _part(change, lambda table: {key: value for key, value in table.items() if not is_bridged(key)})


def _part(change: Change[K, V], chosen: Callable[[Mapping[K, Any]], dict[K, Any]]) -> Change[K, V]:
    return Change(chosen(change.added), chosen(change.replaced), chosen(change.removed))
