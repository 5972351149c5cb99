# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A machine that can reboot: ``python -m tests.molecule_support.machine DIRECTORY``.

It runs in user-mode Linux, or emulated by QEMU on Debian's own kernel. A guest of user-mode Linux that reboots itself
would fail to open its network device a second time; so it powers off instead and is restarted by this process, on the
same disk, until this process is stopped. ``machine.json`` in the directory describes the guest; the console's output
is in ``console``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

from tests.lab import qemu, uml
from tests.lab.cores import Pin, pinned
from tests.lab.stock_kernel import stock_kernel

MEMORY = "384M"


def _user_mode(directory: Path, settings: dict[str, Any]) -> list[str]:
    # The guest does not outlive this process, however that ends.
    argv = ["setpriv", "--pdeathsig", "KILL", "linux.uml", f"mem={MEMORY}", "root=/dev/ubda", "rw", "noreboot"]
    argv += [f"ubd0={directory}/disk.cow,{settings['disk']}", "quiet", "con=null", "con0=null,fd:1", "ssl=null"]
    argv += [f"umid={settings['name']}", f"uml_dir={directory}/run/", f"lab={settings['shared']}"]
    return [*argv, uml.network_word(uml.Network(settings["namespace"], settings["mac"]))]


def _emulated(settings: dict[str, Any]) -> list[str]:
    kernel = stock_kernel()
    root = ["root.type=ext4", "root.options=rw,noatime", "root.source=/dev/vda"]
    root += ["share.modules=/usr/lib/modules", "share.lab=/opt/lab"]
    argv = qemu.command(kernel, "768M", root, ["/sbin/init"])
    argv += ["-serial", "stdio", "-drive", f"file={settings['disk']},if=virtio,format=raw,snapshot=on"]
    argv += [*qemu.share(str(kernel.modules), "modules", ",readonly=on"), *qemu.share(settings["shared"], "lab")]
    return [*argv, *qemu.network(0, f"ifname={settings['device']},script=no,downscript=no", settings["mac"])]


def main(arguments: Sequence[str]) -> int:
    """Run the guest again each time it ends."""
    directory = Path(arguments[0])
    settings = json.loads((directory / "machine.json").read_text(encoding="utf-8"))
    if settings["emulated"]:
        guest, environment = _emulated(settings), dict(os.environ)
    else:
        guest, environment = _user_mode(directory, settings), uml.environment(directory, MEMORY)
    argv = ["ip", "netns", "exec", settings["namespace"], *guest]
    while True:
        with open(directory / "console", "ab") as console, contextlib.ExitStack() as processor:
            # An emulated guest has two processors.
            pin = Pin([], ()) if settings["emulated"] else processor.enter_context(pinned())
            done = subprocess.run(
                [*pin.words, *argv],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                pass_fds=pin.descriptors,
                check=False,
            )
            console.write(f"--- ended with status {done.returncode}\n".encode())
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
