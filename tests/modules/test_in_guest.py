# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the tests in ``guest`` inside user-mode Linux, whose kernel has IPVS and loadable modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.lab.guest_command import Guest
from tests.lab.uml import run_in_uml

GUEST = Path(__file__).resolve().parent / "guest" / "check_guest.py"


def test_modules_that_need_a_kernel_of_their_own(capfd):
    # The plug-in of hypothesis, which no test there uses, would import all of hypothesis at the end.
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(GUEST)]
    if not os.environ.get("FULL"):
        command += ["-m", "not full"]
    status = run_in_uml(command, Guest(memory="768M", modules=(), directory=str(GUEST.parents[3]), timeout=1800))
    assert status == 0, capfd.readouterr().out[-6000:]
