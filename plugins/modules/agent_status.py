#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: agent_status
short_description: Read the status of the agent on a node
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Returns what the agent reports at its control socket. Reads neither the kernel nor the cluster's state, so it takes
    a fraction of the time of M(kubenode.proxy.service_proxy_info). The agent itself compares the kernel with the
    cluster.
  - An agent that does not answer does not fail the module.
  - The playbook kubenode.proxy.report uses it with C(proxy_report_live=true).
  - Requires the rights to connect to the control socket, which root and the account of the agent have.
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes
options:
  state_directory:
    description: Directory with the agent's control socket. Use the same directory for all modules.
    type: path
    default: /run/kubenode-proxy
  wait_timeout:
    description:
      - How long to wait, in seconds, for an agent that does not answer yet, has not programmed anything, or does not
        watch everything that it should at the API server. Then its status is returned as it is.
    type: float
    default: 0.0
attributes:
  action_group:
    description:
      - Use C(group/kubenode.proxy.state)
        in C(module_defaults) to set options that all modules of the group have.
    support: full
    membership:
      - kubenode.proxy.state
  idempotent:
    description: Changes nothing. Ages and counters differ between runs.
    support: full
seealso:
  - module: kubenode.proxy.service_proxy_info
  - module: kubenode.proxy.fleet_report
"""

EXAMPLES = r"""
- name: Read the status of the agent
  kubenode.proxy.agent_status:
  register: status

- name: Check that the agent is healthy
  ansible.builtin.assert:
    that: status.agent.running and status.agent.healthy
"""

RETURN = r"""
agent:
  description: The status, as M(kubenode.proxy.service_proxy_info) returns it.
  type: dict
  returned: always
  sample:
    running: true
    healthy: true
    ready: true
    error: ""
    mode: nftables
    version: 1.0.0+91f0c2d4a7be
    last_sync_age: 12.3
    syncs: 812
    drift_repaired: 0
    started_from_cache: false
    api_server: {services: watching, endpointslices: watching, nodes: watching}
    api_server_lost_seconds: {services: 0, endpointslices: 0, nodes: 0}
    obstacle: ""
    drained_until: ""
node_name:
  description: Name of the Node object.
  type: str
  returned: the agent answers
  sample: worker-1
mode:
  description: The mode in effect.
  type: str
  returned: the agent answers
  sample: nftables
mode_reason:
  description: Why this mode is in effect.
  type: str
  returned: the agent answers
  sample: requested
variant:
  description: The variant of iptables in use, empty if none is.
  type: str
  returned: the agent answers
  sample: ""
families:
  description: Address families that are served.
  type: list
  elements: str
  returned: the agent answers
  sample: [IPv4]
counts:
  description: Numbers of Services, and of their ports and endpoints over all families.
  type: dict
  returned: the agent answers
  sample: {services: 3, service_ports: 4, endpoints: 7}
programmed:
  description: Number of entries that the agent has programmed, by table.
  type: dict
  returned: always
  sample: {IPv4 table objects: 84}
refused:
  description: Invalid objects, and invalid parts of objects, that the agent skips.
  type: list
  elements: dict
  returned: the agent answers
  sample:
    - {kind: Service, namespace: shop, name: web, field: "", reason: "spec.clusterIP: \"x\" is not an IP address"}
refused_count:
  description: Their number.
  type: int
  returned: the agent answers
  sample: 1
isolated_pods:
  description: Number of pods of this node that network policies isolate.
  type: int
  returned: the agent answers
  sample: 2
cautions:
  description: What has no effect on this node, such as annotations that its mode does not support.
  type: list
  elements: str
  returned: the agent answers
  sample: []
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import ask_agent
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.state_directory import (
    STATE_DIRECTORY,
    control_socket,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.agent_state import (
    served_state,
    state_of,
    watches_everything,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def status(module: AnsibleModule) -> dict[str, Any]:
    """Return the status of the agent, once it follows the cluster or the time for that is over."""
    end = time.monotonic() + module.params["wait_timeout"]
    while True:
        try:
            answer = ask_agent(control_socket(module.params["state_directory"]), {"command": "status"})
        except ProxyError as error:
            found = {"changed": False, "programmed": {}, "agent": {"running": False, "error": str(error)}}
        else:
            found = {"changed": False, "agent": state_of(answer), **served_state(answer)}
            if found["mode"] and watches_everything(found["agent"]):
                return found
        if time.monotonic() >= end:
            return found
        time.sleep(1)


def main() -> None:
    """Run the module."""
    options = {"state_directory": {"type": "path", "default": STATE_DIRECTORY}}
    run(status, {**options, "wait_timeout": {"type": "float", "default": 0.0}})


if __name__ == "__main__":
    main()
