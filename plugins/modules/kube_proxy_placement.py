#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_proxy_placement
short_description: Keep kube-proxy off nodes by a label, or let it return
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Puts a rule into kube-proxy's DaemonSet, a required node affinity by which it does not run on nodes that have the
    label O(label), and labels the nodes O(nodes). The cluster then takes kube-proxy's pod away from these nodes. What
    kube-proxy has programmed there stays in their kernels and goes on serving.
  - With O(state=absent) it takes the label away again, and kube-proxy returns.
  - Everything else in the DaemonSet stays as it is. Since the rule changes its pod template, the cluster replaces all
    pods of the DaemonSet once, a few at a time, when the rule is put in and when it is removed.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  nodes:
    description:
      - Names of Node objects. All of them have to be there, or nothing is changed.
      - An empty list only puts in, or removes, the rule.
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
      - With O(state=absent), whether to remove the rule from the DaemonSet as well. This is refused while nodes other
        than O(nodes) have the label, because kube-proxy would return to all of them.
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
      - Seconds to wait, each, for the DaemonSet to replace its pods after its rule has changed, and for every node to
        be without kube-proxy, or with one that is ready. V(0) does not wait.
    type: float
    default: 300
attributes:
  diff_mode:
    description: Shows the affinity of the DaemonSet and the label of the nodes, before and after.
    support: full
notes:
  - Needs the rights to get and patch the DaemonSet, to get and patch nodes, to list pods in its namespace, and, for
    O(remove_rule), to list nodes.
  - What re-creates the DaemonSet from its own manifest (C(kubeadm upgrade), a managed add-on, a GitOps controller)
    removes the rule, and kube-proxy returns to all nodes. Tell it to leave kube-proxy alone, or give it the rule.
seealso:
  - module: kubenode.proxy.service_proxy
"""

EXAMPLES = r"""
- name: Take kube-proxy away from this host
  kubenode.proxy.kube_proxy_placement:
    nodes: ["{{ inventory_hostname }}"]
    kubeconfig: ~/.kube/config
  delegate_to: localhost

- name: Let it return
  kubenode.proxy.kube_proxy_placement:
    nodes: ["{{ inventory_hostname }}"]
    state: absent
    kubeconfig: ~/.kube/config
  delegate_to: localhost

- name: Remove the rule when all hosts are back
  kubenode.proxy.kube_proxy_placement:
    state: absent
    remove_rule: true
    kubeconfig: ~/.kube/config
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
changes:
  description: What has changed, in words.
  type: list
  elements: str
  returned: success
  sample: ["Node worker-1: labelled kubenode.proxy/managed"]
error_kind:
  description: The kind of failure, V(api) or V(configuration).
  type: str
  returned: failure
  sample: api
"""

import os
from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.placement import (
    DEFAULT_LABEL,
    Placement,
    Placer,
    Waiting,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_connection, api_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def placed(module: AnsibleModule) -> Dict[str, Any]:
    """Keep kube-proxy off the nodes, or bring it back, and return what was changed."""
    parameters = module.params
    connection = api_connection(parameters, os.environ)
    if parameters["remove_rule"] and parameters["state"] != "absent":
        raise ConfigurationError("remove_rule: goes with state absent only")
    placement = Placement(parameters["namespace"], parameters["name"], parameters["label"])
    client = ApiClient(connection, parameters["api_timeout"])
    try:
        placer = Placer(client, placement, module.check_mode, Waiting(parameters["wait_timeout"]))
        if parameters["state"] == "present":
            outcome = placer.keep_off(parameters["nodes"])
        else:
            outcome = placer.bring_back(parameters["nodes"], parameters["remove_rule"])
    finally:
        client.close()
    return {
        "changed": bool(outcome.changes),
        "changes": list(outcome.changes),
        "diff": {"before": outcome.before, "after": outcome.after},
    }


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "remove_rule": {"type": "bool", "default": False},
            "namespace": {"type": "str", "default": "kube-system"},
            "name": {"type": "str", "default": "kube-proxy"},
            "label": {"type": "str", "default": DEFAULT_LABEL},
            "wait_timeout": {"type": "float", "default": 300.0},
            **api_spec(),
        },
        supports_check_mode=True,
    )
    run(module, placed)


if __name__ == "__main__":
    main()
