#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: startup_taint
short_description: Remove the taint with which a Node was registered
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Removes every taint with a key from a Node, so that pods are scheduled there. Other taints are kept.
  - kubelet registers a Node with the taint if it has the option C(--register-with-taints). Until the taint is removed,
    no pod without a toleration starts on the Node.
  - The role P(kubenode.proxy.agent#role) calls the module when Services and network policies are in force, if its
    variable O(kubenode.proxy.agent#role:main:agent_startup_taint) is set.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  node_name:
    description: Name of the Node.
    type: str
    required: true
  key:
    description: Key of the taint, with any value and any effect.
    type: str
    required: true
attributes:
  diff_mode:
    description: Shows the taints of the Node, before and after.
    support: full
notes:
  - Requires permission to get and patch nodes.
seealso:
  - module: kubenode.proxy.agent_status
"""

EXAMPLES = r"""
- name: Let pods be scheduled on this host
  kubenode.proxy.startup_taint:
    node_name: "{{ inventory_hostname }}"
    key: kubenode.proxy/not-ready
    kubeconfig: ~/.kube/config
  delegate_to: localhost
"""

RETURN = r"""
taints:
  description: The remaining taints of the Node, as in its specification.
  type: list
  elements: dict
  returned: success
  sample: [{key: example.com/dedicated, value: ci, effect: NoSchedule}]
error_kind:
  description: The kind of failure, V(api) or V(configuration), or V(preflight) where a Node does not exist.
  type: str
  returned: failure
  sample: api
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.startup_taint import remove_taint
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_spec, connected
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def without_taint(module: AnsibleModule) -> dict[str, Any]:
    """Remove the taint and return what is left."""
    with connected(module) as client:
        change = remove_taint(client, module.params["node_name"], module.params["key"], module.check_mode)
    return {
        "changed": change.before != change.after,
        "taints": change.after,
        "diff": {"before": {"taints": change.before}, "after": {"taints": change.after}},
    }


_OPTIONS = {
    "node_name": {"type": "str", "required": True},
    "key": {"type": "str", "required": True, "no_log": False},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(without_taint, _OPTIONS)


if __name__ == "__main__":
    main()
