# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A user-mode Linux machine that can reboot: ``python -m tests.molecule_support.machine DIRECTORY``.

A guest that reboots by itself would open its network device a second time and fail; so the guest is told to end
instead, and is started again here, on the same disk, until this process is ended. ``machine.json`` in the directory
says what to start; the console's output is in ``console``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Sequence

from tests.lab import uml

MEMORY = "384M"


def main(arguments: Sequence[str]) -> int:
    """Run the guest again and again."""
    directory = Path(arguments[0])
    settings = json.loads((directory / "machine.json").read_text(encoding="utf-8"))
    # The guest does not outlive this process, however that ends.
    argv = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", settings["namespace"]]
    argv += ["linux.uml", f"mem={MEMORY}"]
    argv += ["root=/dev/ubda", "rw", "noreboot"]
    argv += [f"ubd0={directory}/disk.cow,{settings['disk']}", "quiet", "con=null", "con0=null,fd:1", "ssl=null"]
    argv += [f"umid={settings['name']}", f"uml_dir={directory}/run/", f"lab={settings['shared']}"]
    argv.append(f"vec0:transport=tap,ifname={settings['tap']},depth=64,gro=1,mac={settings['mac']}")
    environment = uml.environment(directory, MEMORY)
    while True:
        with open(directory / "console", "ab") as console:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment, check=False
            )
            console.write(f"--- ended with status {done.returncode}\n".encode())
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
