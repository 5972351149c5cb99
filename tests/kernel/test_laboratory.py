# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The test lab's guarantees: own kernels, nothing written to the host, nothing left behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from tests.lab.cluster import Lab
from tests.lab.guest_command import Guest
from tests.lab.system import LabError
from tests.lab.topology import pods_of
from tests.lab.uml import run_in_uml

MARK = f"kubenode-laboratory-test-{os.getpid()}"
SMALL = Guest(memory="256M", modules=())


def test_a_guest_streams_output_and_returns_the_status(capfd: pytest.CaptureFixture[str]) -> None:
    status = run_in_uml(["sh", "-c", "uname -r; echo to stderr >&2; exit 7"], SMALL)
    printed = capfd.readouterr().out.splitlines()
    assert status == 7
    assert printed[0] != os.uname().release
    assert printed[1] == "to stderr"


def test_only_the_named_directory_of_the_host_is_written(tmp_path: Path) -> None:
    script = f"touch /etc/{MARK} /run/{MARK} /var/{MARK} {tmp_path}/{MARK} && echo seen > {tmp_path}/named/result"
    (tmp_path / "named").mkdir()
    status = run_in_uml(["sh", "-c", script], SMALL._replace(writable=[str(tmp_path / "named")]))
    assert status == 0
    assert (tmp_path / "named" / "result").read_text(encoding="ascii") == "seen\n"
    assert not any(Path(place, MARK).exists() for place in ("/etc", "/run", "/var", tmp_path))


def test_a_command_that_does_not_end_is_killed() -> None:
    with pytest.raises(LabError, match="did not end within 4 s"):
        run_in_uml(["sleep", "60"], SMALL._replace(timeout=4))


def test_a_missing_command_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_uml(["no-such-command"], SMALL) == 127
    assert "no-such-command: No such file or directory" in capfd.readouterr().out


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(f"t{os.getpid() % 1000000}") as running:
        yield running
    assert not running.directory.exists()
    assert running.namespace("") not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


NODES = ("lab-iptables", "lab-ipvs")


@pytest.mark.parametrize("name", NODES)
def test_files_that_a_node_writes_stay_in_the_node(lab: Lab, name: str) -> None:
    places = [f"/etc/modules-load.d/{MARK}", f"/etc/sysctl.d/{MARK}", f"/run/{MARK}", f"/var/lib/{MARK}"]
    lab.output(name, f"mkdir -p /etc/modules-load.d /etc/sysctl.d && touch {' '.join(places)}")
    assert lab.output(name, f"ls {' '.join(places)}").split() == sorted(places)
    assert not any(os.path.exists(place) for place in places)


@pytest.mark.parametrize("name", NODES)
def test_commands_on_a_node_ignore_the_start_up_files_of_the_machines_root(lab: Lab, name: str) -> None:
    line = "echo read; export PATH=/nowhere"
    files = "/root/.bashrc /root/.profile /root/.bash_profile /root/.ssh/rc"
    lab.output(name, f"mkdir -p /root/.ssh; for file in {files}; do echo '{line}' >$file; done")
    assert lab.output(name, "echo $PATH").split(":")[0] == "/usr/local/sbin"
    lab.output(name, f"rm {files}")


def test_rules_and_modules_of_a_node_are_its_own(lab: Lab) -> None:
    lab.output("lab-iptables", f"iptables -t nat -N {MARK[:28]}")
    assert MARK[:28] in lab.output("lab-iptables", "iptables-save -t nat")
    assert MARK[:28] not in lab.output("lab-ipvs", "iptables-legacy-save")
    lab.output("lab-ipvs", "modprobe ip_vs && ipvsadm -A -t 10.0.0.1:80 -s rr")
    assert "ip_vs" in lab.output("lab-ipvs", "lsmod")


@pytest.mark.parametrize("name", NODES)
def test_every_pod_answers_the_client_and_sees_its_address(lab: Lab, name: str) -> None:
    node = lab.node(name)
    pods = pods_of(lab.snapshot, node)
    assert len(pods) > 10
    for pod in pods:
        protocol, port = pod.ports[0]
        kind = f"DNS-{protocol}" if port == 53 else protocol
        for address, client in ((pod.address, node.client), (pod.address6, node.client6)):
            answer = lab.ask(kind, address, port, client)
            assert (answer.outcome, answer.backend, answer.peer) == ("answer", pod.name, client)


def test_pods_of_different_nodes_reach_each_other(lab: Lab) -> None:
    first, second = (pods_of(lab.snapshot, node)[-1] for node in lab.nodes)
    protocol, port = first.ports[0]
    for address, source in ((first.address, second.address), (first.address6, second.address6)):
        answers = lab.ask_from_pod("lab-ipvs", second.name, protocol, address, port, 2)
        assert [(answer.backend, answer.peer) for answer in answers] == [(first.name, source)] * 2


def test_virtual_addresses_reach_the_node_of_the_client_and_no_other(lab: Lab) -> None:
    for node in lab.nodes:
        assert lab.ask("TCP", "198.51.100.77", 9, node.client, timeout=1).outcome != "refused"
        lab.output(node.name, "ip addr add 198.51.100.77/32 dev lo")
        assert lab.ask("TCP", "198.51.100.77", 9, node.client).outcome == "refused"
        lab.output(node.name, "ip addr del 198.51.100.77/32 dev lo")
