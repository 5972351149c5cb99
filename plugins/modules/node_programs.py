#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: node_programs
short_description: Check a node before anything is changed there
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Returns which of the given programs a node has, as the modules of this collection find them.
  - Fails for a file that could not be written later, and for a Python that cannot run the agent.
  - Like every module of the collection, it fails with one line on a Python that is too old, and on request if another
    service proxy runs on the node. The roles use it as the first task on a node, so that nothing is changed there
    before.
  - Fails without root, which what follows needs, unless only programs are requested. If the node refuses C(become),
    it names that.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  names:
    description: Names of the programs.
    type: list
    elements: str
    required: true
  exclusive:
    description:
      - Whether to fail if another service proxy runs on the node, such as kube-proxy. It needs root, which sees the
        programs of all users.
    type: bool
    default: false
  standalone:
    description:
      - Whether to fail if nothing would serve the Services of a node that will enforce network policies only. So it is
        if the playbook C(kubenode.proxy.migrate) keeps kube-proxy off the node, or the node's agent serves Services and
        no other service proxy runs.
    type: bool
    default: false
  ignore_findings:
    description:
      - Service proxies to accept nevertheless, by the names that O(kubenode.proxy.service_proxy#module:ignore_findings)
        lists, such as V(kube-proxy). Other names are accepted and have no effect.
    type: list
    elements: str
    default: []
  writes:
    description:
      - Paths of files to be written later, each with the variable that names it, or an empty text. Fails if one does
        not exist and could not be written, for example on a file system that is read-only or full.
    type: dict
    default: {}
  sizes:
    description: The sizes of files among O(writes) in bytes, by their paths; others have 4096.
    type: dict
    default: {}
  version_file:
    description: A file that says which version is installed. Those of O(writes) that exist stay if it has O(version).
    type: path
  version:
    description: The content of O(version_file). Files of another one are replaced, which needs room beside them.
    type: str
    default: ""
  reads:
    description: Paths of files to be read later, each with the variable that names it. Fails if one cannot be read.
    type: dict
    default: {}
  pythons:
    description:
      - Paths of interpreters, each with the variable that names it. Fails if one cannot run, or is older than Python
        3.9.
    type: dict
    default: {}
  accounts:
    description:
      - Names of accounts that the role P(kubenode.proxy.agent#role) would create, each with the variable that names it.
        Fails if one has another home than the agent's, since the role would change it, and remove it later.
    type: dict
    default: {}
  turn:
    description:
      - V(take) records in C(/run/kubenode-run) that this run of Ansible changes the node, and fails if another run
        does; V(end) records that it does no more, and checks nothing. The record of a run that was killed is ignored if
        that was on this controller, and after an hour.
      - Two runs at once would leave files of one with a unit of the other. Check mode records nothing.
    type: str
    choices: [none, take, end]
    default: none
  lock_timeout:
    description:
      - Fail if a convergence would, because the agent runs, or because another convergence does not end within this
        number of seconds. In check mode only the agent counts.
    type: float
attributes:
  check_mode:
    description: Nothing is changed in any mode, except who may change the node next.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
requirements:
  - Python 3.9 or later on the node
seealso:
  - module: kubenode.proxy.kernel_modules
"""

EXAMPLES = r"""
- name: Look for the programs of iptables
  kubenode.proxy.node_programs:
    names: [iptables, ip6tables]
  register: programs

- name: Stop if one is missing
  ansible.builtin.assert:
    that: programs.missing | length == 0

- name: Stop if kube-proxy or another service proxy runs
  kubenode.proxy.node_programs:
    names: []
    exclusive: true
"""

RETURN = r"""
found:
  description: Paths of the programs by name.
  type: dict
  returned: success
  sample: {iptables: /usr/sbin/iptables}
missing:
  description: Names of the programs that the node lacks.
  type: list
  elements: str
  returned: success
  sample: [ip6tables]
python:
  description: The Python that has run this module, with which units of the roles can run programs of the engine.
  type: str
  returned: success
  sample: /usr/bin/python3
taken:
  description: Whether O(turn) is V(take). The task fails if another run changes the node.
  type: bool
  returned: success
  sample: true
error_kind:
  description: The kind of failure, V(python), V(preflight), V(kernel) or V(configuration).
  type: str
  returned: failure
  sample: preflight
"""

import contextlib
import os
import pwd
import sys
from typing import Any

from ansible.module_utils.basic import AnsibleModule

import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python as supported
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError, ProxyError, os_errors
from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import STATE_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.base.whole_files import check_room
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import read_text
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.programs import find_program
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.programs import run as execute
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import root_needed, run
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.findings import judge
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.processes import service_proxy_findings

#: Of the account that the role agent creates.
_OWN = ("Service proxy of the node", "/var/lib/kubenode-proxy")


def check_node(module: AnsibleModule) -> dict[str, Any]:
    """Return the paths of programs. Raises PreflightError for what would fail later, or must not be."""
    if os.geteuid() and (module.params["exclusive"] or not module.params["names"]):
        raise PreflightError(root_needed("what follows"))
    for standalone in (False, True):
        if module.params["standalone" if standalone else "exclusive"]:
            judge(service_proxy_findings(standalone=standalone), module.params["ignore_findings"])
    reasons = []
    checks = (_check_written, _check_read, _check_python, _check_account)
    for option, check in zip(("writes", "reads", "pythons", "accounts"), checks):
        for path, variable in module.params[option].items():
            try:
                check(path, module.params)
            except ProxyError as error:
                reasons.append(f"{variable}: {error}" if variable else str(error))
    if reasons:
        raise PreflightError("; ".join(reasons))
    if module.params["lock_timeout"] is not None:
        lock = ConvergenceLock(STATE_DIRECTORY, module.params["lock_timeout"])
        if module.check_mode:
            lock.refuse_agent()
        else:
            with lock:
                pass
    paths = {name: find_program(name) for name in module.params["names"]}
    found = {name: path for name, path in paths.items() if path}
    missing = [name for name, path in paths.items() if not path]
    return {"changed": False, "found": found, "missing": missing, "python": sys.executable}


def _check_written(path: str, parameters: dict[str, Any]) -> None:
    """Raise PreflightError if a file could not be written; one that exists and may stay as it is could."""
    with os_errors(PreflightError, f"{path} cannot be written"):
        if not os.path.exists(path) or _is_upgrade(parameters):
            check_room(path, int(parameters["sizes"].get(path, 4096)))


def _is_upgrade(parameters: dict[str, Any]) -> bool:
    """Return whether another version is installed than the one that will be."""
    installed = parameters["version_file"] and read_text(parameters["version_file"])
    return bool(installed) and installed.strip() != parameters["version"]


def _check_read(path: str, _parameters: dict[str, Any]) -> None:
    """Raise PreflightError if a file cannot be read."""
    with os_errors(PreflightError, f"{path} cannot be read"), open(path, "rb"):
        pass


def _check_python(path: str, _parameters: dict[str, Any]) -> None:
    """Raise PreflightError if an interpreter cannot run the agent."""
    done = execute([path, "-I", "-c", "import sys; print(*sys.version_info[:2])"])
    version = done.output.split()
    if done.status or len(version) != 2:
        raise PreflightError(f"{path} is no Python: {done.errors[:200] or done.output[:200]}")
    if tuple(map(int, version)) < supported.MINIMUM:
        raise PreflightError(f"{path} is Python {'.'.join(version)}, the agent needs 3.9 or later")


def _check_account(name: str, _parameters: dict[str, Any]) -> None:
    """Raise PreflightError for an account of others, which would be changed now and removed later."""
    with contextlib.suppress(KeyError):
        # Comment and home directory of passwd(5).
        if name == "root" or pwd.getpwnam(name)[4:6] == _OWN:
            return
        raise PreflightError(f"the account {name} exists, and is not the agent's own: name another one, or root")


_OPTIONS = {
    "names": {"type": "list", "elements": "str", "required": True},
    "exclusive": {"type": "bool", "default": False},
    "standalone": {"type": "bool", "default": False},
    "ignore_findings": {"type": "list", "elements": "str", "default": []},
    "writes": {"type": "dict", "default": {}},
    "sizes": {"type": "dict", "default": {}},
    "version_file": {"type": "path"},
    "version": {"type": "str", "default": ""},
    "reads": {"type": "dict", "default": {}},
    "pythons": {"type": "dict", "default": {}},
    "accounts": {"type": "dict", "default": {}},
    "turn": {"type": "str", "choices": ["none", "take", "end"], "default": "none"},
    "lock_timeout": {"type": "float"},
}


def main() -> None:
    """Run the module."""
    run(check_node, _OPTIONS)


if __name__ == "__main__":
    main()
