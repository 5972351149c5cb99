#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kube_proxy_placement
short_description: Keep kube-proxy off labelled nodes, or let it return
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Adds a rule to kube-proxy's DaemonSet, a required node affinity that excludes nodes with the label O(label), and
    sets that label on the nodes O(nodes). The cluster then deletes kube-proxy's pods on these nodes. The rules that
    kube-proxy has programmed there remain in the kernel and continue to serve.
  - With O(state=absent) it removes the label, and kube-proxy returns.
  - Nothing else in the DaemonSet is changed. Because the rule is part of the pod template, the cluster replaces all
    pods of the DaemonSet once, a few at a time, when the rule is added and when it is removed.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  nodes:
    description:
      - Names of Node objects. Nothing is changed unless all of them exist.
      - With an empty list only the rule is added or removed.
    type: list
    elements: str
    default: []
  state:
    description:
      - V(present) keeps kube-proxy off the nodes, V(absent) brings it back.
    type: str
    choices: [present, absent]
    default: present
  remove_rule:
    description:
      - With O(state=absent), whether to also remove the rule from the DaemonSet. The module refuses this while nodes
        other than O(nodes) have the label, because kube-proxy would return to all of them.
    type: bool
    default: false
  namespace:
    description: Namespace of the DaemonSet.
    type: str
    default: kube-system
  name:
    description: Name of the DaemonSet.
    type: str
    default: kube-proxy
  label:
    description: Key of the label.
    type: str
    default: kubenode.proxy/managed
  wait_timeout:
    description:
      - Seconds to wait for the DaemonSet to replace its pods after the rule has changed, and again for kube-proxy to be
        gone from every node, or ready on it. With V(0) the module does not wait.
    type: float
    default: 300
  wait_part:
    description:
      - How often, in seconds, a line on the controller says what the module waits for, and why. The action plugin of
        the module runs it in parts of this length.
    type: float
    default: 10
  continued:
    description:
      - Whether an earlier part returned RV(waiting). The module then also waits for the DaemonSet to replace its pods,
        although it does not change the rule again. The action plugin sets it.
    type: bool
    default: false
attributes:
  diff_mode:
    description: Shows the affinity of the DaemonSet and the label of the nodes, before and after.
    support: full
notes:
  - Requires permission to get and patch the DaemonSet, to get and patch nodes, to list pods in the DaemonSet's
    namespace, and, for O(remove_rule), to list nodes.
  - A tool that recreates the DaemonSet from its own manifest (C(kubeadm upgrade), a managed add-on, a GitOps
    controller) removes the rule, and kube-proxy returns to all nodes. Exclude kube-proxy from that tool, or add the
    rule to its manifest.
seealso:
  - module: kubenode.proxy.service_proxy
"""

EXAMPLES = r"""
- name: Keep kube-proxy off this host
  kubenode.proxy.kube_proxy_placement:
    nodes: ["{{ inventory_hostname }}"]
    kubeconfig: ~/.kube/config
  delegate_to: localhost

- name: Let kube-proxy return
  kubenode.proxy.kube_proxy_placement:
    nodes: ["{{ inventory_hostname }}"]
    state: absent
    kubeconfig: ~/.kube/config
  delegate_to: localhost

- name: Remove the rule once kube-proxy has returned to all hosts
  kubenode.proxy.kube_proxy_placement:
    state: absent
    remove_rule: true
    kubeconfig: ~/.kube/config
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
changes:
  description: Descriptions of the changes.
  type: list
  elements: str
  returned: success
  sample: ["Node worker-1: labelled kubenode.proxy/managed"]
waiting:
  description: What the cluster has not done yet. Empty if it has done all, or if the module does not wait.
  type: str
  returned: success
  sample: "kube-proxy is not ready on node worker-1: pod kube-proxy-2tsxv is Pending (ContainerCreating)"
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
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import placement as kube_proxy
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_spec, connected
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def placed(module: AnsibleModule) -> dict[str, Any]:
    """Keep kube-proxy off the nodes, or bring it back, and return the changes."""
    parameters = module.params
    if parameters["remove_rule"] and parameters["state"] != "absent":
        raise ConfigurationError("remove_rule: only allowed with state absent")
    placement = kube_proxy.Placement(parameters["namespace"], parameters["name"], parameters["label"])
    waiting = kube_proxy.Waiting(min(parameters["wait_part"], parameters["wait_timeout"]), parameters["continued"])
    problem = ""
    with connected(module) as client:
        placer = kube_proxy.Placer(client, placement, module.check_mode, waiting)
        try:
            if parameters["state"] == "present":
                placer.keep_off(parameters["nodes"])
            else:
                placer.bring_back(parameters["nodes"], parameters["remove_rule"])
        except kube_proxy.StillWaiting as error:
            problem = str(error)
    outcome = placer.outcome()
    return {
        "changed": bool(outcome.changes),
        "changes": list(outcome.changes),
        "waiting": problem,
        "diff": {"before": outcome.before, "after": outcome.after},
    }


_OPTIONS = {
    "nodes": {"type": "list", "elements": "str", "default": []},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "remove_rule": {"type": "bool", "default": False},
    "namespace": {"type": "str", "default": "kube-system"},
    "name": {"type": "str", "default": "kube-proxy"},
    "label": {"type": "str", "default": kube_proxy.DEFAULT_LABEL},
    "wait_timeout": {"type": "float", "default": 300.0},
    "wait_part": {"type": "float", "default": 10.0},
    "continued": {"type": "bool", "default": False},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(placed, _OPTIONS)


if __name__ == "__main__":
    main()
