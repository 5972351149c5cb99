# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-mode Linux: commands and long-lived nodes on a separate kernel.

``python -m tests.lab.uml [--writable DIRECTORY] [--memory 1G] [--modules NAME,...] -- COMMAND...``

The guest's root is the host's file system under an overlay in memory. It needs Debian's package user-mode-linux and
root; on processors with AMX also a C compiler (see xstate.c).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Optional, Sequence

from tests.lab.cores import pinned
from tests.lab.guest_command import Guest, make_parser, run_in_guest, run_parsed, settings
from tests.lab.node import Specification
from tests.lab.system import LabError, ip_batch, run

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILERS = ("cc", "gcc", "clang", "tcc")


class Network(NamedTuple):
    """A guest's network: the device eth0 of a named network namespace of the host, see :func:`connect`."""

    namespace: str
    mac: str


def connect(namespace: str, fabric: str, device: str) -> None:
    """Create the network namespace of a guest, whose eth0 is the other end of ``device`` in the namespace ``fabric``.

    The guest has a packet socket on eth0, where a packet wakes the guest before it is interrupted. A tap interrupts it
    first: then the guest may find nothing to read, and the packet waits until another one comes. The namespace itself
    has no address and answers nothing.
    """
    ip_batch([f"netns add {namespace}", f"link add {device} netns {fabric} type veth peer name eth0 netns {namespace}"])
    run(["ip", "netns", "exec", namespace, "sysctl", "-q", "-w", "net.ipv6.conf.eth0.disable_ipv6=1"])
    ip_batch(["link set eth0 up"], namespace)


def network_word(network: Network) -> str:
    """Return the word of the guest's command line for its network device, which the guest calls vec0."""
    return f"vec0:transport=raw,ifname=eth0,depth=64,gro=1,mac={network.mac}"


def missing() -> Optional[str]:
    """Return what this host lacks for user-mode Linux, as one line with the remedy; None if nothing."""
    if os.uname().machine != "x86_64":
        return f"user-mode Linux runs on x86_64 hosts, this one is {os.uname().machine}"
    if os.geteuid() != 0:
        return "user-mode Linux nodes need root (the host's files are their root): run as root"
    if shutil.which("linux.uml") is None:
        return "linux.uml is not installed: apt-get install user-mode-linux"
    if _large_register_state() and _compiler() is None:
        return "this processor has AMX, which linux.uml needs a small shim for: apt-get install tcc (or gcc)"
    return None


def _large_register_state() -> bool:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("flags"):
                return "amx_tile" in line.split()
    return False


def _compiler() -> Optional[str]:
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def _preload(directory: Path) -> dict[str, str]:
    """Return the environment that lets linux.uml run on this processor; see xstate.c."""
    if not _large_register_state():
        return {}
    library = directory / "xstate.so"
    compiler = _compiler()
    if compiler is None:
        raise LabError(str(missing()))
    source = str(Path(__file__).with_name("xstate.c"))
    run([compiler, "-O2", "-fPIC", "-shared", "-nostdlib", "-o", str(library), source])
    return {"LD_PRELOAD": str(library)}


def _memory_directory(megabytes: int) -> dict[str, str]:
    """Return where linux.uml keeps the guest's memory: /dev/shm unless it is too small, as in many containers."""
    try:
        status = os.statvfs("/dev/shm")
        if status.f_bavail * status.f_frsize >= megabytes << 20:
            return {}
    except OSError:
        pass
    return {"TMPDIR": tempfile.gettempdir()}


def _megabytes(memory: str) -> int:
    number, unit = memory[:-1], memory[-1:].upper()
    if not number.isdigit() or unit not in ("M", "G"):
        raise LabError(f"memory {memory!r}: expected a number followed by M or G")
    return int(number) * (1024 if unit == "G" else 1)


def environment(scratch: Path, memory: str) -> dict[str, str]:
    """Return the environment for linux.uml with this much memory; files that it needs are in ``scratch``."""
    return {**os.environ, **_preload(scratch), **_memory_directory(_megabytes(memory))}


def start(
    specification: Specification, memory: str, network: Optional[Network] = None, disk: str = ""
) -> subprocess.Popen[bytes]:
    """Boot a guest that becomes the specified node; its console goes to ``console`` in the scratch directory.

    ``disk``: the image of the guest's disk /dev/ubda, if it needs one.
    """
    problem = missing()
    if problem:
        raise LabError(problem)
    scratch = Path(specification.scratch)
    specification.save(scratch / "specification.json")
    argv: list[str] = []
    if network:
        argv += ["ip", "netns", "exec", network.namespace]
    argv += ["linux.uml", "rootfstype=hostfs", "rootflags=/", "ro", f"mem={memory}", f"init={sys.executable}"]
    argv += ["con=null", "con0=null,fd:1", "quiet", f"umid={scratch.name}", f"uml_dir={scratch}/"]
    argv += [f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", f"PATH={os.environ['PATH']}"]
    if network:
        argv.append(network_word(network))
    if disk:
        argv.append(f"ubda={disk}")
    argv += ["--", "-m", "tests.lab.node", str(scratch / "specification.json")]
    with open(scratch / "console", "wb") as console, pinned() as pin:
        return subprocess.Popen(
            [*pin.words, *argv],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=environment(scratch, memory),
            pass_fds=pin.descriptors,
            start_new_session=True,
        )


def stop(process: int) -> None:
    """End the guest whose monitor has this process id, and every host process it is made of."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                os.killpg(process, 0)
            except ProcessLookupError:
                return
            # If another process started the guest, its parent or init reaps it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
            time.sleep(0.05)


def run_in_uml(argv: Sequence[str], guest: Guest) -> int:
    """Run one command in a guest, as :func:`tests.lab.guest_command.run_in_guest` does."""

    @contextlib.contextmanager
    def boot(specification: Specification) -> Iterator[Callable[[], bool]]:
        process = start(specification, guest.memory)
        try:
            yield lambda: process.poll() is not None
        finally:
            stop(process.pid)
            process.wait()

    return run_in_guest(boot, argv, guest, hostname="uml")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command in a guest from the command line; return its exit status, or 2 if the guest does not boot."""
    parser = make_parser("python -m tests.lab.uml", "run a command in user-mode Linux")
    parser.add_argument("command", nargs="+", help="the command and its arguments")
    return run_parsed(parser, arguments, lambda options: run_in_uml(options.command, settings(options)))


if __name__ == "__main__":
    sys.exit(main())
