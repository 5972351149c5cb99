# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.lab up|down|status|ssh``: the miniature cluster from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

from tests.lab.cluster import SNAPSHOT, Lab
from tests.lab.system import LabError


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Do what the command line says; 2 and one line when it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--name", default="lab", help="name of the laboratory; several can run at once")
    parser.add_argument("--snapshot", type=Path, default=SNAPSHOT, help="cluster snapshot whose pods are to run (JSON)")
    parser.add_argument("--node", action="append", help="start only this node (repeatable)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start it and print the path of its inventory")
    commands.add_parser("down", help="end it and remove everything")
    commands.add_parser("status", help="say which nodes run")
    shell = commands.add_parser("ssh", help="run a command on a node")
    shell.add_argument("target")
    shell.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        lab = Lab(options.name, options.snapshot.resolve(), options.node or ())
        if options.command == "up":
            lab.up()
            sys.stdout.write(f"{lab.inventory}\n")
        elif options.command == "down":
            lab.down()
        elif options.command == "status":
            states = lab.status()
            sys.stdout.write("".join(f"{name}: {state}\n" for name, state in states.items()))
            return 0 if all(state == "running" for state in states.values()) else 1
        else:
            done = lab.ssh(options.target, " ".join(options.words))
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
    except LabError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
