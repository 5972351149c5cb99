# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inside of a laboratory node: the first process of a namespace node and of a guest with its own kernel.

``python -m tests.lab.node SPECIFICATION [NETWORK_NAMESPACE]``

Both kinds of node see the host's file system as the lower layer of an overlay whose upper layer is memory. Programs
need no image, and nothing they write outlives the node. The first process of a guest loads the kernel modules of its
specification (and ignores words that the guest's kernel appends to the arguments); that of a namespace node enters the
network namespace and creates namespaces for mounts, processes and host name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple, Optional, Sequence

from tests.lab import system

NEW_ROOT = "/run/root"
GUEST_MODULES = "/usr/lib/uml/modules"
CONNECTIONS = Path("/proc/sys/net/netfilter/nf_conntrack_max")
MOST_CONNECTIONS = 65536
#: The ordinary user of a node with sshd, who has sudo, and the numeric ID of this user and of the group.
USER, USER_ID = "ops", 64001
#: The keys with which users may log in to a node.
AUTHORIZED_KEYS = "/etc/ssh/authorized_keys"


class Specification(NamedTuple):
    """The instructions of the host for a node, sent as JSON.

    ``scratch`` is a directory shared with the host, always writable: ``ready``, ``status`` and ``log`` appear there.
    ``visible`` are directories that may be on other file systems of the host, ``writable`` those whose writes reach the
    host. ``network`` are lines of ip(8), ``pods`` mappings with the keys name, address and address6. With ``command``
    the node ends when the command ends; without, it runs sshd (``sshd``: its configuration file) and the echo servers
    (``echo``: their configuration file) until it is killed. A guest finds its modules below ``kernel``, by release, and
    the directories of the host by the file system ``shared``: hostfs (user-mode Linux) or 9p (QEMU). ``views`` are
    directories on other file systems of a guest whose root is not the host's, and where it mounts them, each with a
    separate overlay.
    """

    hostname: str
    scratch: str
    visible: list[str] = []
    writable: list[str] = []
    modules: list[str] = []
    sysctls: dict[str, str] = {}
    network: list[str] = []
    pods: list[dict[str, str]] = []
    environment: dict[str, str] = {}
    directory: str = "/"
    command: Optional[list[str]] = None
    sshd: Optional[str] = None
    echo: Optional[str] = None
    kernel: str = GUEST_MODULES
    shared: str = "hostfs"
    views: dict[str, str] = {}

    def save(self, path: Path) -> None:
        """Write the specification where the node will read it."""
        path.write_text(json.dumps(self._asdict(), indent=1), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Become the node that the specification describes; returns only for a namespace node."""
    specification = Specification(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    if os.getpid() != 1:
        return _namespace_node(specification, arguments[1])
    try:
        _guest_root(specification)
        _live(specification)
    except BaseException:
        _report(specification, traceback.format_exc())
    system.power_off()
    return 1


def _report(specification: Specification, text: str) -> None:
    sys.stderr.write(text)
    with open(os.path.join(specification.scratch, "error"), "w", encoding="utf-8") as stream:
        stream.write(text)


def _namespace_node(specification: Specification, namespace: str) -> int:
    system.enter(namespace, system.CLONE_NEWNET)
    system.unshare(system.CLONE_NEWNS | system.CLONE_NEWUTS | system.CLONE_NEWIPC | system.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            _namespace_root(specification)
            _live(specification)
        except BaseException:
            _report(specification, traceback.format_exc())
        os._exit(1)
    Path(specification.scratch, "pid").write_text(str(child), encoding="ascii")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _overlay() -> None:
    system.mount("run", "/run", "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir("/run/" + name)
    system.mount("overlay", NEW_ROOT, "overlay", data="lowerdir=/,upperdir=/run/upper,workdir=/run/work")
    system.mount("proc", NEW_ROOT + "/proc", "proc")
    system.mount("sysfs", NEW_ROOT + "/sys", "sysfs")
    system.mount("run", NEW_ROOT + "/run", "tmpfs", data="mode=755")


def _namespace_root(specification: Specification) -> None:
    system.mount("none", "/", "", system.MS_REC | system.MS_PRIVATE)
    _overlay()
    system.mount("/dev", NEW_ROOT + "/dev", "", system.MS_BIND | system.MS_REC)
    root_device = os.stat("/").st_dev
    for path in specification.visible:
        if os.stat(path).st_dev != root_device:
            _bind(path)
    for path in [*specification.writable, specification.scratch]:
        _bind(path)
    system.pivot_root(NEW_ROOT)


def _bind(path: str) -> None:
    os.makedirs(NEW_ROOT + path, exist_ok=True)
    system.mount(path, NEW_ROOT + path, "", system.MS_BIND | system.MS_REC)


def shared_tag(number: int) -> str:
    """Return the name by which a guest of QEMU knows a shared directory: the writable ones in order, then scratch."""
    return f"shared{number}"


def _guest_root(specification: Specification) -> None:
    modules = os.path.join(specification.kernel, os.uname().release)
    user_mode = specification.shared == "hostfs"
    system.mount("proc", "/proc", "proc")
    if user_mode:
        system.run(["insmod", modules + "/kernel/fs/overlayfs/overlay.ko"])
    _overlay()
    system.mount("dev", NEW_ROOT + "/dev", "devtmpfs")
    for number, path in enumerate([*specification.writable, specification.scratch]):
        os.makedirs(NEW_ROOT + path, exist_ok=True)
        if user_mode:
            system.mount("none", NEW_ROOT + path, "hostfs", data=path)
        else:
            system.mount(shared_tag(number), NEW_ROOT + path, "9p", data="trans=virtio,version=9p2000.L,cache=none")
    for number, (source, path) in enumerate(specification.views.items()):
        upper, work = f"/run/upper{number}", f"/run/work{number}"
        for directory in (upper, work, NEW_ROOT + path):
            os.makedirs(directory, exist_ok=True)
        system.mount("overlay", NEW_ROOT + path, "overlay", data=f"lowerdir={source},upperdir={upper},workdir={work}")
    system.pivot_root(NEW_ROOT)
    os.makedirs("/dev/pts", exist_ok=True)
    os.makedirs("/dev/shm", exist_ok=True)
    system.mount("devpts", "/dev/pts", "devpts")
    system.mount("shm", "/dev/shm", "tmpfs")
    os.makedirs("/lib/modules", exist_ok=True)
    _show_modules(modules, "/lib/modules/" + os.uname().release)
    if user_mode:
        _choose_legacy_iptables()
    if specification.modules:
        system.run(["modprobe", "-a", *specification.modules])
    _track_many_connections()


def _track_many_connections() -> None:
    """Make room for tests that open a hundred connections a second.

    The kernel tracks each for two minutes after its end. With a gigabyte of memory it has room for 8,192 of them, and
    then drops the packets of new ones.
    """
    if CONNECTIONS.exists() and int(CONNECTIONS.read_text(encoding="ascii")) < MOST_CONNECTIONS:
        CONNECTIONS.write_text(str(MOST_CONNECTIONS), encoding="ascii")


def _show_modules(source: str, place: str) -> None:
    """Let modprobe find the guest's modules, whatever the host has at that place: a directory, a link, nothing."""
    if os.path.islink(place):
        os.unlink(place)
    os.makedirs(place, exist_ok=True)
    system.mount(source, place, "", system.MS_BIND)


def _choose_legacy_iptables() -> None:
    """Make legacy the system's iptables, as update-alternatives would: Debian's guest kernel has no NF_TABLES_IPV4."""
    for family in ("iptables", "ip6tables"):
        for suffix in ("", "-save", "-restore"):
            link = Path("/etc/alternatives", family + suffix)
            if link.is_symlink():
                link.unlink()
                link.symlink_to(f"/usr/sbin/{family}-legacy{suffix}")


def _live(specification: Specification) -> None:
    os.environ.update(specification.environment)
    for name in ("/run/netns", "/run/lock", "/run/sshd"):
        os.makedirs(name, exist_ok=True)
    system.run(["hostname", specification.hostname])
    Path("/etc/hostname").write_text(specification.hostname + "\n", encoding="ascii")
    # Otherwise sudo would ask a DNS server that the node does not reach.
    with open("/etc/hosts", "a", encoding="ascii") as hosts:
        hosts.write(f"127.0.1.1 {specification.hostname}\n")
    system.ip_batch(["link set lo up"])
    for key, value in specification.sysctls.items():
        Path("/proc/sys", key).write_text(value, encoding="ascii")
    system.ip_batch(specification.network)
    make_pods(specification.pods)
    if specification.command is not None:
        _run_command(specification)
        return
    services = []
    if specification.echo:
        services.append([sys.executable, "-m", "tests.lab.echo", specification.echo])
    if specification.sshd:
        _open_accounts(Path(specification.scratch))
        services.append(["/usr/sbin/sshd", "-D", "-e", "-f", specification.sshd])
    _run_services(specification, services)


def make_pods(pods: Sequence[dict[str, str]]) -> None:
    """Give each pod a network namespace behind a veth pair, routed point to point as CNI's ptp plug-in does."""
    lines: list[str] = []
    for number, pod in enumerate(pods):
        device, gateway = f"veth{number}", _gateway(pod)
        lines += [
            f"netns add {pod['name']}",
            f"link add {device} type veth peer name eth0 netns {pod['name']}",
            f"link set {device} up",
            f"addr add {gateway}/32 dev {device}",
            f"route add {pod['address']}/32 dev {device}",
            f"addr add fe80::1/64 dev {device} nodad",
            f"route add {pod['address6']}/128 dev {device}",
        ]
    system.ip_batch(lines)
    for pod in pods:
        gateway = _gateway(pod)
        system.ip_batch(
            [
                "link set lo up",
                "link set eth0 up",
                f"addr add {pod['address']}/32 dev eth0",
                f"route add {gateway}/32 dev eth0",
                f"route add default via {gateway}",
                f"addr add {pod['address6']}/128 dev eth0 nodad",
                "route add default via fe80::1 dev eth0",
            ],
            pod["name"],
        )


def _gateway(pod: dict[str, str]) -> str:
    """Return the node's own address within its pod range, the first one."""
    return pod["address"].rsplit(".", 1)[0] + ".1"


def _open_accounts(scratch: Path) -> None:
    """Let root and :data:`USER`, an ordinary user with sudo, log in with the keys that sshd is configured for.

    sshd reads the keys as the account, and refuses one whose password field begins with an exclamation mark. bash
    would read the ``.bashrc`` of this machine's root for each command, which may change the search path, print
    something or take seconds.
    """
    _edit_root("/etc/shadow", 1, "*")
    _edit_root("/etc/passwd", 6, "/bin/sh")
    for path, line in {
        "/etc/passwd": f"{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:/bin/sh",
        "/etc/group": f"{USER}:x:{USER_ID}:",
        "/etc/shadow": f"{USER}:*:::::::",
    }.items():
        with open(path, "a", encoding="ascii") as accounts:
            accounts.write(line + "\n")
    os.mkdir(f"/home/{USER}")
    os.chown(f"/home/{USER}", USER_ID, USER_ID)
    Path("/etc/sudoers").write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n", encoding="ascii")
    Path(AUTHORIZED_KEYS).write_bytes((scratch / "authorized_keys").read_bytes())
    for path, mode in (("/etc/sudoers", 0o440), (AUTHORIZED_KEYS, 0o644)):
        os.chmod(path, mode)


def _edit_root(path: str, field: int, value: str) -> None:
    """Set a field of root's line in a file of accounts."""
    entries = [line.split(":") for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for entry in entries:
        if entry[0] == "root":
            entry[field] = value
    Path(path).write_text("".join(":".join(entry) + "\n" for entry in entries), encoding="utf-8")


def _run_command(specification: Specification) -> None:
    """Run the command, streaming its output into the shared directory, and leave its exit status there."""
    assert specification.command is not None
    with open(os.path.join(specification.scratch, "output"), "ab", buffering=0) as output:
        try:
            process = subprocess.Popen(
                specification.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=specification.directory,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{specification.command[0]}: {error.strerror}\n".encode())
            status = 127
        else:
            status = _reap(process.pid)
    Path(specification.scratch, "status").write_text(str(status), encoding="ascii")


def _reap(wanted: int) -> int:
    """Wait for one process, collecting the orphans that fall to the first process meanwhile."""
    while True:
        process, status = os.wait()
        if process == wanted:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _run_services(specification: Specification, services: Sequence[Sequence[str]]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with open(os.path.join(specification.scratch, "services.log"), "ab", buffering=0) as log:
        running = {
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid: argv for argv in services
        }
    Path(specification.scratch, "ready").write_text("ready\n", encoding="ascii")
    while True:
        try:
            process, status = os.wait()
        except ChildProcessError:
            time.sleep(1)
            continue
        if process in running:
            words = Path(log.name).read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            command = " ".join(running[process])
            raise system.LabError(f"{command} ended with status {os.waitstatus_to_exitcode(status)}: {words}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
