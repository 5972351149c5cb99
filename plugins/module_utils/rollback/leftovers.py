# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a saved state contains of ipvs mode only because connections through it had not ended when it was saved.

It served nothing new, and need not be restored: connections end with the node's present virtual servers, which a
rollback keeps as long as they have any.
"""

from __future__ import annotations

import re
from typing import Any, Dict

from ..base.addresses import FAMILIES
from ..convergence.modes.stages.still_connected import node_ports
from ..kernel.nftables.raw.reading import RawSet
from ..kernel.nftables.raw.resource import key_and_data
from ..rendering.ipvs.nftables_layout import NODE_PORTS
from ..rendering.nftables.objects import ElementKey, ObjectKey
from .state import NodeState

_MATCHED_SET = re.compile(r"--match-set (\S+)")


def without_leftovers(state: NodeState) -> NodeState:
    """Return the state without entries kept only for open IPVS connections; a state of ipvs mode is returned as is.

    Virtual servers of other programs remain, and so do ipsets that saved chains refer to.
    """
    if state.uses_ipvs:
        return state
    record: Dict[Any, bool] = dict(state.set_elements)
    for family in FAMILIES:
        known = state.ipvs_tables.get(family, {}).get(ObjectKey("set", NODE_PORTS))
        if isinstance(known, RawSet):
            keys = (key_and_data(element)[0] for element in known.elements)
            record.update({ElementKey("element", NODE_PORTS, key): True for key in keys})
    ports = node_ports(record)
    servers = {
        key: value
        for key, value in state.virtual_servers.items()
        if key.address not in state.addresses and (key.protocol, key.port) not in ports
    }
    matched = {name for rule in state.rules() for name in _MATCHED_SET.findall(rule)}
    return state._replace(
        virtual_servers=servers,
        real_servers={key: value for key, value in state.real_servers.items() if key.server in servers},
        ipvs_tables={},
        sets={name: value for name, value in state.sets.items() if name in matched},
        set_elements={key: value for key, value in state.set_elements.items() if key.set in matched},
        devices={},
        addresses={},
    )
