# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which state of ipvs mode is kept for connections; tests/kernel/test_migration_load.py checks that none is lost."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.still_connected import (
    StillConnected,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    SetElementKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource

LISTED, COUNTED = VirtualServerKey("tcp", "10.96.0.10", 80), VirtualServerKey("udp", "192.0.2.1", 30080)
IDLE = VirtualServerKey("tcp", "10.96.0.11", 80)
REAL = {key: RealServerKey(key, "10.1.0.1", 80) for key in (LISTED, COUNTED, IDLE)}
SERVERS = {key: VirtualServer("rr", 0, 0, 32) for key in REAL}
ELEMENTS = {SetElementKey("KUBE-NODE-PORT-UDP", "30080"): True, SetElementKey("KUBE-NODE-PORT-TCP", "30080"): True}


class Table(Resource):
    """A table that records when it is observed."""

    def __init__(self, table, log):
        self.table, self.log = table, log

    def observe(self):
        self.log.append("observed")
        return dict(self.table)


def still_connected(draining):
    log = []

    def listed():
        log.append("listed")
        return {REAL[LISTED]: 1}

    real_servers = Table({key: RealServer(1) for key in REAL.values()}, log)
    kept = StillConnected(real_servers, Table(ELEMENTS, []), listed, lambda: {REAL[COUNTED]: 2}, draining)
    return kept, real_servers, log


def test_real_servers_with_listed_or_counted_connections_are_kept():
    kept, real_servers, log = still_connected(True)
    assert kept.has_connections()
    assert list(kept.real_servers(real_servers.table)) == [REAL[LISTED], REAL[COUNTED]]
    assert list(kept.servers(SERVERS)) == [LISTED, COUNTED]
    assert list(kept.addresses({"10.96.0.10": True, "10.96.0.11": True})) == ["10.96.0.10"]
    assert list(kept.elements(ELEMENTS)) == [SetElementKey("KUBE-NODE-PORT-UDP", "30080")]
    assert list(kept.sets({"KUBE-NODE-PORT-UDP": 1, "KUBE-NODE-PORT-TCP": 1})) == ["KUBE-NODE-PORT-UDP"]
    # A connection that was opened while the list was read is counted when the real servers are observed.
    assert log == ["listed", "observed"]


def test_nothing_is_kept_without_draining():
    kept, real_servers, log = still_connected(False)
    assert not kept.has_connections() and log == []
    assert kept.real_servers(real_servers.table) == {} == kept.sets({"KUBE-NODE-PORT-UDP": 1})
