# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible sends a module with every file that it imports, wherever the statement is.

So imports decide what a task costs: for each run of a playbook, Ansible parses these files once more and sends them to
each host.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.unit.test_layers import COLLECTION, PLUGINS, imports_of

#: These serve or show Services, or judge whether a node could: they need the code of every mode.
WHOLE = {"service_proxy", "service_proxy_info", "kernel_modules_info"}
#: These need what saves and restores the state of a whole node.
HISTORY = {"service_proxy_confirm", "service_proxy_rollback"}
MODULES = sorted(path.stem for path in (PLUGINS / "modules").glob("*.py") if path.stem != "__init__")


@cache
def files_of(dotted: str) -> frozenset[str]:
    """Return the dotted names of the files that an import of ``dotted`` needs directly, without packages."""
    needed = set()
    for _line, name in imports_of(PLUGINS.joinpath(*dotted.split(".")).with_suffix(".py")):
        name = name[len(COLLECTION) :] if name.startswith(COLLECTION) else name[len("plugins.") :]
        for candidate in (name, name.rpartition(".")[0]):
            if candidate and PLUGINS.joinpath(*candidate.split(".")).with_suffix(".py").is_file():
                needed.add(candidate)
                break
    return frozenset(needed)


def payload(module: str) -> set[str]:
    """Return the dotted names of all files that Ansible sends for a module."""
    found: set[str] = set()
    waiting = [f"modules.{module}"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += files_of(name)
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name not in WHOLE | HISTORY])
def test_a_module_for_one_part_of_a_node_is_sent_without_the_engine(module):
    sent = payload(module)
    larger = ("module_utils.convergence.modes.registry", "module_utils.agent")
    engine = [name for name in sent if name.startswith(larger)]
    assert not engine and len(sent) < 100, sorted(sent)


@pytest.mark.parametrize("module", sorted(WHOLE))
def test_the_payload_is_followed_through_the_engine(module):
    assert {"module_utils.convergence.modes.registry", "module_utils.resources"} <= payload(module)
