# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No file is opened in the engine unless it is known who can write its directory.

A new call that opens a file fails here until it uses ``regular_files``, or its file is listed with the reason why only
root, or only the caller, decides what its path refers to.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "plugins" / "module_utils"
#: Calls that return a descriptor or content for a path.
OPENERS = ("open", "os.open", "io.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open", "zipfile.ZipFile")
METHODS = ("read_text", "read_bytes", "write_text", "write_bytes")

PROC = "files of /proc, /sys and /etc, by constant names"
GIVEN = "a file that the user names, of whatever kind: a pipe as well"
TOOL = "runs on the controller as the user, on the user's files"
OWN = "the collection's own files"
KNOWN: dict[str, str] = {
    "base/regular_files.py": "what the others use",
    "base/whole_files.py": "a directory, to write it out",
    "kernel/ipvs/outline.py": PROC,
    "command/cli.py": "/dev/null",
    "cluster/api/access/kubeconfig.py": GIVEN,
    "cluster/api/connection.py": GIVEN,
    "cluster/files/snapshot.py": GIVEN,
    "configuration/load.py": GIVEN,
    "controller/fleet/page.py": OWN,
    "controller/fleet/sources.py": TOOL,
    "controller/libraries.py": TOOL,
    "controller/variable_names.py": OWN,
    "convergence/unchanged/inputs.py": f"{GIVEN}, which is not opened, and the engine's own",
    "convergence/unchanged/surroundings.py": PROC,
    "generic/provisional.py": "new directories below one in /run that only the user of the process can write",
    "kernel/facts.py": PROC,
    "kernel/files.py": "files below /etc, by names that root gives",
    "kernel/ipvs/servers.py": PROC,
    "kernel/ipvs/connections.py": PROC,
    "kernel/memory_group.py": PROC,
    "kernel/modules/module_parameters.py": PROC,
    "kernel/modules/modules.py": PROC,
    "kernel/parameters/sysctls.py": PROC,
    "kernel/file_locks.py": PROC,
    "kernel/xtables/lock.py": "/run/xtables.lock, which iptables opens in the same way, in root's directory",
    "kernel/xtables/recent.py": PROC,
    "kernel/xtables/variant.py": PROC,
    "module_support/binary_files.py": TOOL,
    "packaging/archive.py": OWN,
    "packaging/bytecode.py": "an archive in memory",
    "packaging/identity.py": OWN,
    "packaging/running.py": OWN,
    "preflight/processes.py": PROC,
}


def calls_of(path: Path) -> set[str]:
    """Return the names by which a file opens others, as they are written in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in OPENERS or (
            isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and name != "facts.read_text"
        ):
            found.add(name)
    return found


def test_every_file_that_opens_others_is_known() -> None:
    opening = {str(path.relative_to(ENGINE)) for path in sorted(ENGINE.rglob("*.py")) if calls_of(path)}
    assert opening - set(KNOWN) == set(), "use regular_files, or say here why the directory can be trusted"
    assert set(KNOWN) - opening == set(), "opens nothing any more"


@pytest.mark.parametrize("path", sorted(ROOT.glob("roles/*/files/*.py")), ids=lambda path: path.name)
def test_scripts_that_roles_install_follow_no_link(path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in OPENERS]
    assert [ast.unparse(node) for node in calls if "O_NOFOLLOW" not in ast.unparse(node)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("with open(p) as f: pass", {"open"}),
        ("import os\nos.open(p, 0)", {"os.open"}),
        ("Path(p).read_text()", {"Path(p).read_text"}),
        ("listener.open()", set()),
        ("facts.read_text('/proc/modules')", set()),
    ],
)
def test_the_check_finds_calls(tmp_path, text, found) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    assert calls_of(path) == found
