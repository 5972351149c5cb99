#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: node_programs
short_description: Find programs on a node, and check that no other service proxy runs there
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Returns which of the given programs a node has, as the modules of this collection find them.
  - Like every module of the collection, it fails with one line on a Python that is too old, and on request if another
    service proxy runs on the node. The roles use it as the first task on a node, so that nothing is changed there
    before.
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
  ignore_findings:
    description:
      - Service proxies to accept nevertheless, by the names that O(kubenode.proxy.service_proxy#module:ignore_findings)
        lists, such as V(kube-proxy). Other names are accepted and have no effect.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Nothing is changed in any mode.
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
error_kind:
  description: The kind of failure, V(python), V(preflight) or V(configuration).
  type: str
  returned: failure
  sample: preflight
"""

from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.programs import find_program
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.findings import judge
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.processes import service_proxy_findings


def found_programs(module: AnsibleModule) -> Dict[str, Any]:
    """Return the paths of programs. Raises PreflightError if another service proxy runs and must not."""
    if module.params["exclusive"]:
        judge(service_proxy_findings(), module.params["ignore_findings"])
    found: Dict[str, str] = {}
    for name in module.params["names"]:
        path = find_program(name)
        if path:
            found[name] = path
    missing = [name for name in module.params["names"] if name not in found]
    return {"changed": False, "found": found, "missing": missing}


_OPTIONS = {
    "names": {"type": "list", "elements": "str", "required": True},
    "exclusive": {"type": "bool", "default": False},
    "ignore_findings": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    """Run the module."""
    run(found_programs, _OPTIONS)


if __name__ == "__main__":
    main()
