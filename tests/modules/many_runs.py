# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run modules many times on the node, each in a child process, as a payload of Ansible would run them.

Reads a list of (module, arguments, check mode) from standard input and writes the results in the same order.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import sys
from typing import Any

COLLECTION = "ansible_collections.kubenode.proxy.plugins.modules"


def begin(module: str, arguments: dict[str, Any], check: bool) -> tuple[int, int]:
    """Run a module in a child process; return its number, and the descriptor from which its result is read."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        given = {**arguments, "_ansible_check_mode": check, "_ansible_diff": True, "_ansible_remote_tmp": "/tmp"}
        sys.stdin = io.TextIOWrapper(io.BytesIO(json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()))
        sys.argv = [module]
        try:
            runpy.run_module(f"{COLLECTION}.{module}", run_name="__main__")
        except SystemExit:
            pass
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    return child, reading


def end(child: int, reading: int) -> Any:
    """Wait for a module, and return its result."""
    with os.fdopen(reading, encoding="utf-8") as stream:
        text = stream.read().strip()
    os.waitpid(child, 0)
    return json.loads(text) if text.startswith("{") else text


def main() -> None:
    """Run everything."""
    sys.path[:0] = os.environ["ANSIBLE_COLLECTIONS_PATH"].split(os.pathsep)
    runs = json.load(sys.stdin)
    for name in sorted({name for name, _arguments, _check in runs}):
        importlib.import_module(f"{COLLECTION}.{name}")
    json.dump([end(*begin(*each)) for each in runs], sys.stdout)


if __name__ == "__main__":
    main()
