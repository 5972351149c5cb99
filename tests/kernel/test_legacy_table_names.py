# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of legacy iptables tables without access to the kernel's list of them, which only root can read."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT

# As for an agent without root: the list cannot be opened, and the kernel is queried table by table.
SCRIPT = """
import builtins, json, os
from module_utils.kernel.xtables import variant

real = builtins.open
def refuse(path, *arguments, **options):
    if str(path).endswith("_tables_names"):
        raise PermissionError(13, "Permission denied")
    return real(path, *arguments, **options)
variant.open = refuse
variant.os.access = lambda path, mode: False
found = variant.run_save("iptables-legacy-save", "legacy", "IPv4")
print(json.dumps([variant.table_names("IPv4"), variant.table_names("IPv6"), found.status, found.output]))
"""


def test_an_agent_without_root_finds_the_rules_that_it_programmed_before() -> None:
    make = "iptables-legacy -t nat -N KUBE-SERVICES && ip6tables-legacy -t filter -N KUBE-SERVICES"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{make} && exec "$0" -c "$1"', sys.executable, SCRIPT],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT / "plugins")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    four, six, status, saved = json.loads(done.stdout)
    assert "nat" in four and "filter" in six
    assert status == 0 and ":KUBE-SERVICES - [0:0]" in saved


def test_without_the_right_to_ask_no_table_is_known() -> None:
    script = SCRIPT.partition("found =")[0] + 'print(variant.table_names("IPv4"))'
    drop = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
    done = subprocess.run(
        ["unshare", "-n", *drop, sys.executable, "-c", script],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT / "plugins")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
