# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inside of a guest whose power is cut: it boots with its last state, checks that, and converges until the end.

``python -m tests.systemd.power_cut_guest FIRST MODE...``

The disk /dev/ubda holds what outlives the guest. FIRST is the number of the first new state; the modes follow one
another. On the console it prints ``BOOTED NUMBER``, with 0 for a node without a state, then ``BEGIN NUMBER`` and
``DONE NUMBER`` for each change; and ``WRONG`` with the reason if what was restored is not exactly one state.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any, Iterator, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import manifests

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import boot_directory, boot_keeping, boot_state
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.boot_keeping import NextBoot
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.boot_state import BootSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge, inspect
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackRequest, rollback

NODE, OWN = "worker", "192.0.2.10"
HISTORY = "/mnt/history"
_EVERY_ROLLBACK = 4


def configuration(mode: str) -> dict[str, Any]:
    """Return the settings of a mode, ``ipvs-nftables`` for that filter backend, as a BootSettings has them."""
    name, _dash, backend = mode.partition("-")
    node = {"ipvsFilterBackend": backend or "iptables"} if name == "ipvs" else {}
    return {"configuration": {"mode": name}, "node_configuration": node}


def objects(number: int, local: bool) -> list[Any]:
    """Return the cluster's state of this number, with or without the pods of this node."""
    ports = [manifests.port(80, name="web")]
    items = [manifests.node(NODE, OWN, "10.244.1.0/24")]
    for each in range(number % 7 + 2):
        name = f"state-{number}" if not each else f"svc-{each}"
        endpoints = [manifests.endpoint(f"10.244.{number % 200}.{part}", "elsewhere") for part in range(1, each + 3)]
        endpoints += [manifests.endpoint(f"10.244.1.{number % 200 + 1}", NODE)] if local else []
        address = f"10.96.{number % 200}.{each + 10}"
        items.append(manifests.service(name, address, ports, type="NodePort"))
        items[-1]["spec"]["ports"][0]["nodePort"] = 30000 + each
        items.append(manifests.endpoint_slice(name, endpoints, ports))
    return items


def request(number: int, mode: str, local: bool = True) -> Request:
    """Return the convergence to the state of a number."""
    given, items = configuration(mode), objects(number, local)
    return Request(
        ClusterState.from_objects(items),
        load(given["configuration"], "", given["node_configuration"]).configuration,
        objects=lambda: iter(items),
        node_name=NODE,
        history_directory=HISTORY,
        keep_states=3,
        max_unserved_percent=100.0,
    )


def mode_of(number: int, modes: Sequence[str]) -> str:
    """Return the mode of a state: each for three states, so that most changes are within a mode."""
    return modes[number // 3 % len(modes)]


def booted(modes: Sequence[str]) -> int:
    """Restore as the unit does, and return the number of the state. Raises AssertionError unless it is exactly that."""
    program = boot_directory.path_of(boot_directory.PROGRAM)
    if not os.path.exists(program):
        return 0
    command = ["/usr/bin/python3", "-I", "-B", program, "--max-age", "604800"]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    state = boot_state.read()
    if state is None:
        assert "no state to restore" in words, words
        return 0
    names = [item["metadata"]["name"] for item in state.objects if item["kind"] == "Service"]
    number = next(int(name[len("state-") :]) for name in names if name.startswith("state-"))
    report = inspect(request(number, mode_of(number, modes), local=False))
    assert not report.changed, f"{words}: {report.changes}"
    return number


def changes(first: int, before: int, modes: Sequence[str]) -> Iterator[str]:
    """Converge from one state to the next, with a rollback now and then; yield a line before and after each."""
    number = first
    while True:
        yield f"BEGIN {number}"
        mode = mode_of(number, modes)
        # Every other change is the first one after an upgrade, which writes the program again.
        boot_keeping.engine_digest = functools.partial(str, number // 2)
        converge(request(number, mode), next_boot=NextBoot(BootSettings(**configuration(mode)), True))
        yield f"DONE {number}"
        if number % _EVERY_ROLLBACK == 0:
            yield f"BEGIN {before}"
            rollback(RollbackRequest(history_directory=HISTORY, keep=3, stop_units=False))
            yield f"DONE {before}"
        else:
            before = number
        number += 1


def main(arguments: Sequence[str]) -> int:
    """Boot, check and converge; end only with an error."""
    first, modes = int(arguments[0]), arguments[1:]
    os.makedirs(boot_directory.DIRECTORY, exist_ok=True)
    subprocess.run(["mount", "-t", "ext4", "/dev/ubda", "/mnt"], check=True)
    os.makedirs("/mnt/boot", 0o700, exist_ok=True)
    subprocess.run(["mount", "--bind", "/mnt/boot", boot_directory.DIRECTORY], check=True)
    for command in ("link add eth9 type dummy", f"addr add {OWN}/24 dev eth9", "link set eth9 up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    with open("/dev/console", "w", encoding="utf-8") as console:
        try:
            number = booted(modes)
            print(f"BOOTED {number}", file=console, flush=True)
            for line in changes(first, number, modes):
                print(line, file=console, flush=True)
        except Exception as error:
            print(f"WRONG {error!r}", file=console, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
