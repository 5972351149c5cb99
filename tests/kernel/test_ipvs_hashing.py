# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedulers of IPVS that hash clients, mh and sh: nodes that agree, and endpoints that get no new connections."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, Iterator, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.backends import PORT, Backend, endpoint, make_network
from tests.lab import manifests
from tests.lab.system import inside, ip_batch

pytestmark = pytest.mark.uml

PORTS = [manifests.port(PORT)]
ENDPOINTS = 10
CLIENTS = 300
#: The Service of each scheduler.
ADDRESSES = {"mh": "10.103.97.2", "sh": "10.103.97.3"}


def cluster(numbers: Sequence[int]) -> ClusterState:
    """Return a cluster in which both Services have these endpoints, in this order, a slice for each."""
    objects: list[Any] = []
    for scheduler, address in ADDRESSES.items():
        metadata = {"annotations": {"kubenode.proxy/scheduler": scheduler}}
        objects.append(manifests.service(scheduler, address, PORTS, metadata=metadata))
        for place, number in enumerate(numbers):
            listed = [manifests.endpoint(endpoint(number), "node1")]
            objects.append(manifests.endpoint_slice(scheduler, listed, PORTS, name=f"{scheduler}-{place}"))
    return ClusterState.from_objects(objects)


def programmed(directory: Path, numbers: Sequence[int], behaviour: str = "kube-proxy") -> None:
    configuration = load({"mode": "ipvs"}, node_source={"behaviour": behaviour}).configuration
    request = Request(cluster(numbers), configuration, node_name="node1", state_directory=str(directory))
    converge(request._replace(whole_cluster=False))


def reached(address: str, client: str) -> str:
    """Return the number of the endpoint that a client reaches, or how it was refused."""
    with socket.socket() as connection:
        connection.settimeout(30)
        connection.bind((client, 0))
        try:
            connection.connect((address, PORT))
        except OSError as error:
            return type(error).__name__
        return connection.recv(16).decode()


def clients(count: int) -> list[str]:
    return [f"10.9.{number >> 8}.{number & 255}" for number in range(1, count + 1)]


def choices() -> dict[str, list[str]]:
    """Return the endpoint that each client reaches on this node, by scheduler."""
    return {name: [reached(address, client) for client in clients(CLIENTS)] for name, address in ADDRESSES.items()}


@contextlib.contextmanager
def endpoints(hold: bool = False) -> Iterator[None]:
    """Give the node in whose network namespace this runs its endpoints and clients; see Backend for ``hold``."""
    make_network(ENDPOINTS)
    ip_batch(["address add 10.9.0.1/16 dev lo"])
    with contextlib.ExitStack() as stack:
        for number in range(1, ENDPOINTS + 1):
            stack.callback(Backend(number, hold).close)
        yield


@contextlib.contextmanager
def second_node() -> Iterator[None]:
    """Run the body in another network namespace, which has its own virtual servers."""
    name = f"knsecond{os.getpid()}"
    ip_batch([f"netns add {name}"])
    ip_batch(["link set lo up"], name)
    try:
        with inside(f"/run/netns/{name}"):
            yield
    finally:
        ip_batch([f"netns delete {name}"])


def test_nodes_agree_and_removing_an_endpoint_moves_few_clients(tmp_path: Path) -> None:
    everything = list(range(1, ENDPOINTS + 1))
    with endpoints():
        programmed(tmp_path / "first", everything)
        here = choices()
        assert all(len(set(chosen)) == ENDPOINTS for chosen in here.values())
        programmed(tmp_path / "first", [number for number in everything if number != 4])
        fewer = choices()["mh"]
    with second_node(), endpoints():
        programmed(tmp_path / "second", everything[::-1])
        assert choices() == here
    moved = [was for was, now in zip(here["mh"], fewer) if was != now]
    assert "4" not in fewer and moved.count("4") == here["mh"].count("4")
    # Maglev moves a few others as well.
    assert len(moved) - moved.count("4") <= 0.03 * CLIENTS


@pytest.mark.full
def test_a_node_that_has_added_endpoints_in_other_steps_differs_little_with_mh(tmp_path: Path) -> None:
    """The kernel keeps real servers in the order of their addition, and mh gives a contested slot to the first."""
    everything = list(range(1, ENDPOINTS + 1))
    with endpoints():
        programmed(tmp_path, everything[5:])
        programmed(tmp_path, everything)
        here = choices()["mh"]
    with second_node(), endpoints():
        programmed(tmp_path / "second", everything)
        there = choices()["mh"]
    differing = sum(one != other for one, other in zip(here, there))
    print(f"{differing} of {CLIENTS} clients differ")
    assert differing <= 0.02 * CLIENTS


def weights(address: str) -> dict[str, str]:
    """Return the weights of the real servers of a virtual server, by address."""
    lines = subprocess.run(["ipvsadm", "-Sn"], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(f"-a -t {address}:")]
    return {row[4].partition(":")[0]: row[7] for row in rows}


@pytest.mark.parametrize("behaviour", [pytest.param("kube-proxy", marks=pytest.mark.full), "corrected"])
def test_clients_of_a_draining_endpoint(tmp_path: Path, behaviour: str) -> None:
    """With corrected behaviour they get another endpoint; IPVS refuses them until the last connection has ended."""
    (client,) = clients(1)
    with endpoints(hold=True), contextlib.ExitStack() as stack:
        programmed(tmp_path, [1, 2, 3], behaviour)
        chosen = {}
        for scheduler, address in ADDRESSES.items():
            connection = stack.enter_context(socket.create_connection((address, PORT), 30, (client, 0)))
            chosen[scheduler] = int(connection.recv(16))
        for scheduler, number in chosen.items():
            others = [item for item in (1, 2, 3) if item != number]
            programmed(tmp_path, others, behaviour)
            assert weights(ADDRESSES[scheduler])[endpoint(number)] == "0"
            found = reached(ADDRESSES[scheduler], client)
            assert found in map(str, others) if behaviour == "corrected" else found == "ConnectionRefusedError"
            programmed(tmp_path, [1, 2, 3], behaviour)
            assert reached(ADDRESSES[scheduler], client) == str(number)
