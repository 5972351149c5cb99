# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent serves external addresses of Services in the operator's ranges, and follows these without a restart."""

from __future__ import annotations

import signal

import pytest

from tests.kernel.agent_node import NODE, cluster_ip
from tests.kernel.userspace_node import Backend, ask, endpoints_of, node_in_mode, service_of
from tests.lab import system
from tests.waiting import wait_for

BACKEND, NODE_IP = "10.244.1.11", "192.0.2.1"
EXTERNAL, BALANCER, OUTSIDE = "198.51.100.7", "198.51.100.8", "203.0.113.7"
SECONDS = 10.0


def served() -> list[str]:
    """Return the external addresses at which the Service answers."""
    found = []
    for address in (EXTERNAL, BALANCER, OUTSIDE):
        try:
            if ask(address, 80).startswith(BACKEND):
                found.append(address)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("mode", ["nftables", "userspace"])
def test_external_addresses_follow_the_ranges(tmp_path, mode):
    node = node_in_mode(tmp_path, mode)
    # Another address of the node refuses what no Service takes.
    system.ip_batch([f"address add {address}/32 dev lo" for address in (NODE_IP, EXTERNAL, BALANCER, OUTSIDE)])
    system.ip_batch(["route add 10.96.0.0/12 dev lo"])
    backend = Backend(BACKEND)
    item = service_of(1, type="LoadBalancer", externalIPs=[OUTSIDE, EXTERNAL])
    item["status"] = {"loadBalancer": {"ingress": [{"ip": BALANCER}]}}
    node.store.put(item)
    node.store.put(endpoints_of(1, [BACKEND], node=NODE))

    def configure(*ranges: str) -> None:
        node.node_configuration["servicePolicy"] = {"externalRanges": list(ranges)}
        node.write_configuration()

    try:
        configure("198.51.100.0/24", "2001:db8::/32")
        node.start()
        assert served() == [EXTERNAL, BALANCER] and ask(cluster_ip(1), 80).startswith(BACKEND)
        reason = f"spec.externalIPs: {OUTSIDE} is outside of servicePolicy.externalRanges"
        wait_for(lambda: any(reason in event["note"] for event in node.api.posted), SECONDS)
        assert reason in node.log and reason in str(node.status()["refused"])
        explained = node.run("explain", f"{OUTSIDE}:80", "--control", str(tmp_path / "agent.sock"))
        assert reason in explained.stdout and "no Service has this destination" in explained.stdout

        configure(f"{OUTSIDE}/32", f"{BALANCER}/32")
        node.process.send_signal(signal.SIGHUP)
        wait_for(lambda: served() == [BALANCER, OUTSIDE], SECONDS)
        assert node.differences()["changed"] is False
        assert f"{EXTERNAL} is outside" in str(node.status()["refused"])

        configure("198.51.100.0/33")
        node.process.send_signal(signal.SIGHUP)
        invalid = 'servicePolicy.externalRanges[0]: "198.51.100.0/33" is not a CIDR'
        wait_for(lambda: invalid in str(node.status()["reloadError"]), SECONDS)
        configure()
        node.process.send_signal(signal.SIGHUP)
        wait_for(lambda: served() == [EXTERNAL, BALANCER, OUTSIDE], SECONDS)
        assert not node.status()["refused"] and node.starts == 1
    finally:
        node.close()
        backend.close()
