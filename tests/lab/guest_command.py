# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one command in a guest with its own kernel: stream its output and return its exit status.

The command lines of :mod:`tests.lab.uml` and :mod:`tests.lab.qemu` share their options here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, ContextManager, Mapping, NamedTuple, Optional, Sequence

from tests.lab.node import Specification
from tests.lab.system import LabError

#: Boots a guest that becomes the specified node; yields a function that reports whether the guest has ended.
Boot = Callable[[Specification], ContextManager[Callable[[], bool]]]

# fmt: off
DATAPLANE_MODULES: tuple[str, ...] = (
    "ip_vs", "ip_vs_rr", "ip_vs_wrr", "ip_vs_lc", "ip_vs_wlc", "ip_vs_sh", "ip_vs_mh", "ip_vs_dh", "ip_vs_sed",
    "ip_vs_nq", "nf_conntrack", "nf_conntrack_netlink", "iptable_nat", "iptable_filter", "iptable_mangle",
    "ip6table_nat", "ip6table_filter", "ip6table_mangle", "xt_MASQUERADE", "xt_comment", "xt_mark", "xt_conntrack",
    "xt_addrtype", "xt_set", "xt_statistic", "xt_recent", "xt_nat", "xt_tcpudp", "xt_sctp", "xt_physdev", "xt_nfacct",
    "ipt_REJECT", "ip6t_REJECT", "nfnetlink_acct", "ip_set", "ip_set_hash_ip", "ip_set_hash_net",
    "ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet", "ip_set_bitmap_port", "ip_set_list_set",
    "ip_set_hash_netiface", "ipv6", "veth", "dummy", "bridge", "br_netfilter", "sctp",
)
# fmt: on


class Guest(NamedTuple):
    """The settings of a guest that runs one command.

    ``memory`` is a number followed by M or G. Only writes below the ``writable`` directories reach the host. The
    command gets the caller's PATH, HOME and LANG and what ``environment`` adds; it starts in ``directory``, by default
    the caller's, and must end within ``timeout`` seconds.
    """

    memory: str = "1G"
    environment: Mapping[str, str] = {}
    modules: Sequence[str] = DATAPLANE_MODULES
    writable: Sequence[str] = ()
    directory: Optional[str] = None
    timeout: float = 1800


def run_in_guest(boot: Boot, argv: Sequence[str], guest: Guest, *, hostname: str) -> int:
    """Boot a guest, run one command in it, stream what it prints, and return its exit status.

    Raises LabError when the guest does not boot or the time is over.
    """
    scratch = Path(tempfile.mkdtemp(prefix="kubenode-guest-"))
    given = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    specification = Specification(
        hostname=hostname,
        scratch=str(scratch),
        writable=[str(Path(path).resolve()) for path in guest.writable],
        modules=list(guest.modules),
        environment={"LANG": "C.UTF-8", **given, "PYTHONDONTWRITEBYTECODE": "1", **guest.environment},
        directory=guest.directory or os.getcwd(),
        command=list(argv),
    )
    try:
        with boot(specification) as ended:
            _stream(ended, scratch, guest.timeout)
        status = scratch / "status"
        if not status.exists():
            raise LabError(f"the guest {hostname} ended without a result:\n{last_words(scratch)}")
        return int(status.read_text(encoding="ascii"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def last_words(scratch: Path) -> str:
    """Return the end of what a failed guest left behind: its own error report, else its console."""
    for name in ("error", "qemu.log", "console"):
        path = scratch / name
        if path.exists() and path.stat().st_size:
            return path.read_text(encoding="utf-8", errors="replace")[-3000:]
    return "no console output"


def _stream(ended: Callable[[], bool], scratch: Path, timeout: float) -> None:
    output = scratch / "output"
    output.touch()
    deadline = time.monotonic() + timeout
    finished: Optional[float] = None
    with open(output, "rb") as stream:
        while True:
            over = ended()
            text = stream.read()
            if text:
                sys.stdout.write(text.decode("utf-8", "replace"))
                sys.stdout.flush()
            if over or (finished is not None and time.monotonic() > finished + 5):
                return
            if finished is None and (scratch / "status").exists():
                finished = time.monotonic()
            if time.monotonic() > deadline:
                raise LabError(f"the command in the guest did not end within {timeout:.0f} s")
            time.sleep(0.05)


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every kind of guest has; see :func:`settings`."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--memory", default="1G", help="the guest's memory (default: 1G)")
    parser.add_argument("--writable", action="append", default=[], help="directory whose writes reach the host")
    parser.add_argument("--modules", help="kernel modules to load, comma separated (default: those of the dataplane)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds until the guest is ended (default: 1800)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="further environment")
    return parser


def settings(options: argparse.Namespace) -> Guest:
    """Return the guest that the parsed options of :func:`make_parser` describe."""
    modules = DATAPLANE_MODULES if options.modules is None else [name for name in options.modules.split(",") if name]
    return Guest(
        memory=options.memory,
        environment=dict(entry.split("=", 1) for entry in options.env),
        modules=modules,
        writable=options.writable,
        timeout=options.timeout,
    )


def run_parsed(
    parser: argparse.ArgumentParser, arguments: Optional[Sequence[str]], run: Callable[[argparse.Namespace], int]
) -> int:
    """Parse the arguments, call ``run`` and return its exit status; report a LabError in one line and return 2."""
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except LabError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
