# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state that kube-proxy 1.36 had programmed when a conformance case was recorded, loaded into a node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, NamedTuple, Optional, Sequence

from tests.lab.later_tables import as_1_38

# The recorded kernel had nfacct counters, which few have. Without them kube-proxy creates rules that drop without their
# counter, and omits all others with a counter, which only count.
_COUNTED_DROP = re.compile(r" -m nfacct --nfacct-name +\S+(?= -j DROP$)", re.MULTILINE)
_COUNTED = re.compile(r"^-A [^\n]* -m nfacct --nfacct-name [^\n]*\n", re.MULTILINE)
# Only nat and filter were recorded; iptables mode creates this chain in mangle as well, and nothing else there.
_CANARY = "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"
_BLOCK = re.compile(r"^### (\d+) ([^:]*): ([^\n]*)\n(.*?)(?=^### |\Z)", re.DOTALL | re.MULTILINE)
_TOOL_SIZES = re.compile(r" bucketsize \d+")
DEVICE = "kube-ipvs0"

Run = Callable[[Sequence[str], Optional[str]], str]


class Block(NamedTuple):
    """The output of one command in one step of a case: the step's number and name, the command, its output."""

    step: int
    name: str
    command: str
    text: str


def blocks(path: Path, step: int) -> list[Block]:
    """Return the blocks of one step of a file ``state-MODE.txt``."""
    found = [
        Block(int(number), name, command, text)
        for number, name, command, text in _BLOCK.findall(path.read_text(encoding="utf-8"))
    ]
    return [block for block in found if block.step == step]


def load(path: Path, run: Run, variant: str = "nft", step: int = 0, later: bool = False) -> None:
    """Program what the file says into the node that ``run`` runs commands on (arguments, standard input, output).

    ``variant``: the iptables to use, nft or legacy. ``later``: write tables of nftables mode as kube-proxy 1.38 would.
    Existing objects with other names are kept.
    """
    recorded = blocks(path, step)
    # Load sets before the chains that match them, and chains before the servers behind them.
    order = {"ipset": 0, "iptables-save": 1, "ip6tables-save": 1, "nft": 1, "ipvsadm": 2, "ip": 3}
    for block in sorted(recorded, key=lambda block: order[block.command.split()[0]]):
        program = block.command.split()[0]
        if program == "ipset":
            run(["ipset", "restore", "-exist"], _TOOL_SIZES.sub("", block.text) + "\n")
        elif program in ("iptables-save", "ip6tables-save"):
            restore = program.replace("-save", f"-{variant}-restore")
            canary = _CANARY if ":KUBE-PROXY-CANARY " in block.text else ""
            run([restore, "--noflush"], f"{_COUNTED.sub('', _COUNTED_DROP.sub('', block.text))}\n{canary}")
        elif program == "nft":
            run(["nft", "-f", "-"], as_1_38(block.text) if later else block.text)
        elif block.command == "ipvsadm -Sn":
            run(["ipvsadm", "-R"], block.text)
        elif program == "ip":
            run(["ip", "link", "add", DEVICE, "type", "dummy"], None)
            addresses = re.findall(r" (inet6?) (\S+)", block.text)
            lines = [f"addr add {address} dev {DEVICE}" for _family, address in addresses]
            run(["ip", "-batch", "-"], "\n".join(lines) + "\n")
