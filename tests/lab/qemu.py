# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""QEMU: commands and nodes on Debian's own kernel, which has IPVS, iptables nft and nftables, unlike Debian's UML.

``python -m tests.lab.qemu [--debian 13] [--writable DIRECTORY] [--memory 1G] [--modules NAME,...] -- COMMAND...``

The processor is emulated in software, so no support for virtualisation is needed: a few seconds from start to the
first program, and programs at about a tenth of their speed. As in user-mode Linux the guest's root is the host's file
system under an overlay in memory; with ``--debian 13`` it is a Debian 13 made from packages, in which the project is at
the same place as on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Optional, Sequence

from tests.lab import debian_root
from tests.lab.calls import Remote, RemoteError
from tests.lab.cores import UNPINNED, Pin, pinned
from tests.lab.guest_command import Guest, make_parser, run_in_guest, run_parsed, settings
from tests.lab.node import Specification, shared_tag
from tests.lab.stock_kernel import SUITES, StockKernel, stock_kernel
from tests.lab.system import LabError, inside, ip_batch

ROOT = Path(__file__).resolve().parent.parent.parent
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# In emulation the mitigations are slow and useless, and RCU's waits for idle processors take seconds.
_KERNEL = ("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "rcupdate.rcu_expedited=1", "net.ifnames=0")
CALLS = "calls"


def open_tap(namespace: str, name: str) -> int:
    """Make a device in the network namespace at ``namespace`` (a path), the other end of a device of a guest.

    Returns the descriptor that the guest's device is made of.
    """
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        # A guest that stops for a moment, as on a busy machine, must not lose packets.
        ip_batch([f"link set {name} txqueuelen 10000"])
    return descriptor


def missing() -> Optional[str]:
    """Return what this host lacks for QEMU nodes, as one line with the remedy; None if nothing."""
    if os.uname().machine != "x86_64":
        return f"the emulated node is an x86_64 machine, this host is {os.uname().machine}"
    if os.geteuid() != 0:
        return "emulated nodes need root (the host's files are their root): run as root"
    if shutil.which("qemu-system-x86_64") is None:
        return "qemu-system-x86_64 is not installed: apt-get install qemu-system-x86"
    return None


def command(
    kernel: StockKernel, memory: str, root: Sequence[str], program: Sequence[str], processors: int = 2
) -> list[str]:
    """Return the command that starts a guest without devices, whose first program is ``program``.

    ``root``: the words of :data:`stock_kernel.FIRST_PROGRAM`, and variables for the first program.
    """
    # The guest does not outlive the process that started it, however that ends.
    argv = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]
    argv += ["-smp", str(processors), "-m", memory]
    argv += ["-M", "q35", "-nodefaults", "-display", "none"]
    argv += ["-kernel", str(kernel.image), "-initrd", str(kernel.first_root)]
    return [*argv, "-append", " ".join([*_KERNEL, *root, "--", *program])]


def share(path: str, tag: str, more: str = "") -> list[str]:
    """Return arguments that give a guest a directory of the host."""
    return ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap{more}"]


def network(number: int, backend: str, mac: str) -> list[str]:
    """Return arguments that give a guest a network device. ``backend``: how QEMU finds its tap device."""
    device = f"virtio-net-pci,netdev=net{number},mac={mac},romfile="
    return ["-netdev", f"tap,id=net{number},{backend}", "-device", device]


class System(NamedTuple):
    """The system of a guest: kernel, root file system (None for the host's), its Python, and the search path."""

    kernel: StockKernel
    root: Optional[Path]
    python: str
    path: str


def system_of(release: Optional[str]) -> System:
    """Return Debian of that release, or this machine's files on the kernel of Debian 12."""
    if release is None:
        return System(stock_kernel(), None, sys.executable, os.environ["PATH"])
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return System(stock_kernel(release), debian_root.debian_root(release), "/usr/bin/python3", path)


def _root_words(system: System) -> list[str]:
    """Return the kernel's words for a guest whose root is that of the system, read-only."""
    options = "trans=virtio,version=9p2000.L,cache=loose,msize=512000,ro"
    words = ["root.type=9p", f"root.options={options}", "root.source=root"]
    if system.root:
        words += [f"view.project={debian_root.PROJECT}", f"view.modules={debian_root.MODULES}"]
        words += [f"share.specification={debian_root.SCRATCH}"]
    words += [f"PYTHONPATH={debian_root.PROJECT if system.root else ROOT}", "PYTHONDONTWRITEBYTECODE=1"]
    return [*words, f"PATH={system.path}"]


class Machine:
    """A running guest that becomes the specified node; a context manager.

    ``devices`` are its network devices, eth0 and so on, as :func:`open_tap` returns them; they are closed here. The
    guest's console is in ``console`` in the scratch directory. It has two processors, or with a ``pin`` one: then
    several guests share out this machine's, as those of user-mode Linux do.
    """

    def __init__(
        self,
        specification: Specification,
        devices: Sequence[int],
        memory: str,
        system: Optional[System] = None,
        pin: Pin = UNPINNED,
    ) -> None:
        problem = missing()
        if problem:
            raise LabError(problem)
        self.scratch = Path(specification.scratch)
        system = system or system_of(None)
        specification = specification._replace(kernel=str(system.kernel.modules), shared="9p")
        if system.root:
            views = {debian_root.PROJECT: str(ROOT), debian_root.MODULES: debian_root.MODULES}
            specification = specification._replace(kernel=debian_root.MODULES, views=views)
        specification.save(self.scratch / "specification.json")
        seen = debian_root.SCRATCH if system.root else self.scratch
        program = [system.python, "-m", "tests.lab.node", f"{seen}/specification.json"]
        argv = command(system.kernel, memory, _root_words(system), program, processors=1 if pin.words else 2)
        argv += ["-no-reboot", "-serial", f"file:{self.scratch}/console"]
        argv += share(str(system.root or "/"), "root", ",readonly=on")
        if system.root:
            argv += share(str(ROOT), "project", ",readonly=on")
            argv += share(str(system.kernel.modules), "modules", ",readonly=on")
            argv += share(str(self.scratch), "specification", ",readonly=on")
        for number, path in enumerate([*specification.writable, specification.scratch]):
            argv += share(path, shared_tag(number))
        argv += ["-chardev", f"socket,id=calls,path={self.scratch}/calls,server=on,wait=off"]
        argv += ["-device", "virtio-serial", "-device", f"virtserialport,chardev=calls,name={CALLS}"]
        for number, descriptor in enumerate(devices):
            argv += network(number, f"fd={descriptor}", f"02:4b:4e:00:01:{number:02x}")
        with open(self.scratch / "qemu.log", "wb") as log:
            self._process = subprocess.Popen(
                [*pin.words, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[*devices, *pin.descriptors],
            )
        for descriptor in devices:
            os.close(descriptor)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def remote(self, timeout: float) -> Remote:
        """Return the object that the guest serves at its port :data:`CALLS`.

        ``timeout``: seconds to wait for it, and for any call.

        Raises LabError with the guest's last words if it does not get so far.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        deadline = time.monotonic() + 30
        try:
            while connection.connect_ex(f"{self.scratch}/calls"):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise LabError(f"the emulated machine did not start:\n{self._last_words()}")
                time.sleep(0.05)
            return Remote(connection, timeout)
        except (OSError, RemoteError) as error:
            connection.close()
            raise LabError(f"the emulated machine does not answer: {error}:\n{self._last_words()}") from error

    def _last_words(self) -> str:
        files = [self.scratch / name for name in ("qemu.log", "console", "error", "output")]
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in files if path.exists())

    def close(self) -> None:
        """End the guest."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ended(self) -> bool:
        """Say whether the guest has ended."""
        return self._process.poll() is not None


def run_in_qemu(argv: Sequence[str], guest: Guest, *, system: Optional[System] = None) -> int:
    """Run one command in a guest, as :func:`tests.lab.guest_command.run_in_guest` does."""
    chosen = system or system_of(None)
    # Bytecode is kept in the guest's memory, so that the next program need not compile it again.
    environment = {"PATH": chosen.path, "PYTHONDONTWRITEBYTECODE": "", **guest.environment}

    @contextlib.contextmanager
    def boot(specification: Specification) -> Iterator[Callable[[], bool]]:
        with contextlib.ExitStack() as stack:
            with pinned() as pin:
                machine = stack.enter_context(Machine(specification, [], guest.memory, chosen, pin))
            yield machine.ended

    return run_in_guest(boot, argv, guest._replace(environment=environment), hostname="qemu")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command in a guest from the command line; return its exit status, or 2 if the guest does not boot."""
    parser = make_parser("python -m tests.lab.qemu", "run a command on Debian's kernel")
    parser.add_argument("--debian", choices=SUITES, help="the guest's release (default: this machine's files on 12)")
    parser.add_argument("command", nargs="*", help="the command and its arguments; without one the guest is only made")

    def run_command(options: argparse.Namespace) -> int:
        system = system_of(options.debian)
        return run_in_qemu(options.command, settings(options), system=system) if options.command else 0

    return run_parsed(parser, arguments, run_command)


if __name__ == "__main__":
    sys.exit(main())
