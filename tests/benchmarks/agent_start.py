# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the agent's start in nftables mode: from exec until all Services are programmed, beside its floors.

    unshare -n python -m tests.benchmarks.agent_start [--python /usr/bin/python3 ...] [--services 5000] [--endpoints 5]
        [--libraries DIRECTORY]

The agent is the zip application as the role installs it, with the bytecode of this Python; the API server is the test
one on the same machine. Seconds are those of the processor, user and system, unless a column says otherwise. For each
Python: a bare start of Python; the same answers decoded by ``json.loads`` in a process of their own, without that
start; the imports of the agent from the installed archive, and from the one without bytecode, as after an upgrade of
Python; the agent until everything is programmed, how much of that is in the kernel, and how much is beyond Python and
``json.loads``; and how much the agent had used when the API server and DNS were served. Then seconds by the clock, all
on an empty kernel: from the first answer of the API server until the API server and DNS are served and until everything
is; from exec until they are from the copy on disk, with an API server that refuses connections, and with one that does
not answer; and from exec until a static Service is served beside that copy. ``--libraries`` has the packages of the
agent that these Pythons lack, as the role ships them. The best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import PACKAGE, pack
from tests.benchmarks.large_cluster import large_cluster
from tests.kernel.agent_node import ROOT, AgentNode
from tests.kernel.backends import manifests as static_manifests
from tests.kernel.backends import write_manifests
from tests.lab import manifests
from tests.waiting import wait_for

PAGE = 500
FIRST, ALL = "API server and DNS are served", 'filled an empty node" services={}'
_IMPORT = f"import sys; sys.path.insert(0, sys.argv[1]); import {PACKAGE}.command.cli, {PACKAGE}.command.run_command"
_COMPILE = (
    f"import sys; sys.path.insert(0, sys.argv[1]); from {PACKAGE}.packaging.bytecode import main; "
    "sys.exit(main(sys.argv[1:]))"
)
_DECODE = "import gc, json, sys; gc.disable(); [json.loads(open(path, 'rb').read()) for path in sys.argv[1:]]"
_FIRST_SERVICES = (("default", "kubernetes", "10.111.0.1"), ("kube-system", "kube-dns", "10.111.0.10"))


class Processor(NamedTuple):
    """Seconds of the processor in user mode and in the kernel."""

    user: float
    kernel: float

    @property
    def seconds(self) -> float:
        """Return both."""
        return self.user + self.kernel


class InstalledNode(AgentNode):
    """A node with the agent as the role installs it."""

    python = sys.executable
    source = Path()
    archive = Path()

    def install(self, directory: Path) -> None:
        """Pack the engine, and add the bytecode of the node's Python to it."""
        self.source, self.archive = directory / "source.pyz", directory / "kubenode-proxy.pyz"
        self.source.write_bytes(pack(str(ROOT / "plugins" / "module_utils")).content)
        command = [self.python, "-I", "-B", "-c", _COMPILE, str(self.source), str(self.archive)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _command(self, *words: str) -> list[str]:
        return [self.python, "-I", "-B", str(self.archive), *words]

    def processor(self) -> Processor:
        """Return what the agent has used so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return Processor(*(int(value) / os.sysconf("SC_CLK_TCK") for value in fields[11:13]))

    def wait_for_line(self, text: str) -> float:
        """Wait until the log has the text, and return the time. Raises SystemExit if the agent ends before."""

        def logged() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise SystemExit(f"the agent has ended:\n{self.log}")
            return text in self.log

        wait_for(logged, 600.0, 0.005)
        return time.monotonic()


def run(argv: Sequence[str], rounds: int, **environment: str) -> float:
    """Return the least seconds of the processor that a program needed in several rounds."""
    found = []
    for _round in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, check=True, env={**os.environ, **environment})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def fill(node: AgentNode, services: int, endpoints: int) -> None:
    """Put a large cluster into the store, with the Services that a node needs first."""
    for item in large_cluster(services, endpoints):
        if item["kind"] != "Node":
            node.store.put(item)
    for number, (namespace, name, address) in enumerate(_FIRST_SERVICES):
        port = manifests.port(443, name="https")
        node.store.put(manifests.service(name, address, [port], namespace=namespace))
        found = [manifests.endpoint(f"10.110.0.{number + 1}", "node2")]
        node.store.put(manifests.endpoint_slice(name, found, [port], name=f"{name}-a", namespace=namespace))


def pages(node: AgentNode, directory: Path) -> list[str]:
    """Write the answers of the API server to files, and return their paths."""
    paths = []
    for path in ("/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"):
        items = node.store.list(path)[0]
        for start in range(0, len(items), PAGE):
            file = directory / f"page-{len(paths)}.json"
            file.write_text(json.dumps({"items": items[start : start + PAGE]}))
            paths.append(str(file))
    return paths


def starts(node: InstalledNode, services: int) -> dict[str, Any]:
    """Start the agent with and without the API server, each time on an empty kernel."""
    answered: list[float] = []

    def first_answer(_path: str) -> None:
        answered.append(time.monotonic())

    assert node.api is not None
    node.api.wrong = first_answer
    began = time.monotonic()
    node.start(wait=False)
    first = node.wait_for_line(FIRST)
    used_first = node.processor()
    everything = node.wait_for_line(ALL.format(services))
    used = node.processor()
    wait_for(lambda: bool(node.status().get("clusterKnown")))
    memory = node.resident_mebibytes()
    end(node)
    node.stop_api()
    refused = from_disk(node, services)
    with socket.create_server(("127.0.0.1", node.port)):
        silent = from_disk(node, services)
    static = with_static(node)
    node.start_api()
    return {
        "agent": round(used.seconds, 2),
        "agent_kernel": round(used.kernel, 2),
        "agent_first": round(used_first.seconds, 2),
        "first_clock": round(first - answered[0], 2),
        "all_clock": round(everything - answered[0], 2),
        "exec_to_first_clock": round(first - began, 2),
        "exec_to_all_clock": round(everything - began, 2),
        "refused": refused,
        "silent": silent,
        "static": static,
        "memory_mib": round(memory, 1),
    }


def from_disk(node: InstalledNode, services: int) -> dict[str, float]:
    """Start the agent without the API server, and return the seconds until the state on disk is programmed."""
    began = time.monotonic()
    node.start(wait=False)
    first = node.wait_for_line(FIRST) - began
    everything = node.wait_for_line(ALL.format(services)) - began
    used = node.processor().seconds
    end(node)
    return {"first_clock": round(first, 2), "all_clock": round(everything, 2), "agent": round(used, 2)}


def with_static(node: InstalledNode) -> dict[str, float]:
    """Start the agent with a static Service, and return the seconds until it is served."""
    write_manifests(node.services, static_manifests())
    began = time.monotonic()
    node.start(wait=False)
    served = node.wait_for_line(ALL.format(1)) - began
    used = node.processor().seconds
    end(node)
    shutil.rmtree(node.services)
    return {"clock": round(served, 2), "agent": round(used, 2)}


def end(node: InstalledNode) -> None:
    """Stop the agent, and empty the kernel."""
    node.stop()
    subprocess.run(["nft", "flush", "ruleset"], check=True)


def measure(node: InstalledNode, scratch: Path, rounds: int, services: int) -> dict[str, Any]:
    """Return the figures of one Python."""
    python = node.python
    bare = run([python, "-I", "-c", "pass"], rounds)
    decoding = run([python, "-I", "-c", _DECODE, *pages(node, scratch)], rounds) - bare
    imports = run([python, "-I", "-B", "-c", _IMPORT, str(node.archive)], rounds) - bare
    compiling = run([python, "-I", "-B", "-c", _IMPORT, str(node.source)], rounds) - bare
    best = min((starts(node, services) for _round in range(rounds)), key=lambda found: float(found["agent"]))
    return {
        "python": subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.strip(),
        "load": round(os.getloadavg()[0], 1),
        "bare": round(bare, 3),
        "json_loads": round(decoding, 2),
        "imports": round(imports, 2),
        "imports_without_bytecode": round(compiling, 2),
        "beyond": round(best["agent"] - bare - decoding, 2),
        **best,
    }


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON for each Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=5)
    parser.add_argument("--libraries", type=Path, metavar="DIRECTORY")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    system.ip_batch(["link set lo up"])
    for python in options.python:
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            node = InstalledNode(scratch, "nftables")
            try:
                node.python = python
                node.install(scratch)
                if options.libraries is not None:
                    (scratch / "libraries").symlink_to(options.libraries.resolve())
                fill(node, options.services, options.endpoints)
                sys.stdout.write(
                    json.dumps(measure(node, scratch, options.rounds, options.services + len(_FIRST_SERVICES))) + "\n"
                )
                sys.stdout.flush()
            finally:
                node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
