#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: agent_access
short_description: Give the agent an account at the API server with just the needed rights
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Makes a ServiceAccount, a ClusterRole, a ClusterRoleBinding and a Secret with a token that does not expire, all of
    one name, and returns what a kubeconfig needs.
  - The rights are to list and watch Services, EndpointSlices, Nodes and ServiceCIDRs, and to create events.
  - Set C(no_log) on the task, or on what uses its result, because the result holds the token.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  namespace:
    description: Namespace of the ServiceAccount and of the Secret. It must exist.
    type: str
    default: kube-system
  name:
    description: Name of the four objects.
    type: str
    default: kubenode-proxy
  state:
    description:
      - V(absent) deletes those of the objects that this module has made, which it knows by a label. Every node that
        uses the token loses its access.
    type: str
    choices: [present, absent]
    default: present
attributes:
  diff_mode:
    description: The result names what has changed.
    support: none
seealso:
  - module: kubenode.proxy.agent_archive
"""

EXAMPLES = r"""
- name: Make an account for the agent
  kubenode.proxy.agent_access:
    kubeconfig: ~/.kube/config
  register: access
  no_log: true
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
changes:
  description: What has changed, in words.
  type: list
  elements: str
  returned: success
  sample: ["ServiceAccount kube-system/kubenode-proxy created"]
token:
  description: The bearer token. Missing in check mode while there is none.
  type: str
  returned: O(state) is V(present)
  sample: eyJhbGciOi...
server:
  description: URL of the API server, as this host reaches it.
  type: str
  returned: success
  sample: https://192.0.2.10:6443
ca_data:
  description: Certificate authority of the API server, PEM in base64. Empty if the system's authorities are used.
  type: str
  returned: success
  sample: LS0tLS1CRUdJTi...
error_kind:
  description: The kind of failure, V(api) or V(configuration).
  type: str
  returned: failure
  sample: api
"""

import base64
import os
from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.connection import ApiConnection, resolve
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.account import Account, ensure, remove
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_connection, api_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def _authority(connection: ApiConnection) -> str:
    return base64.b64encode(resolve(connection).authority_pem()).decode("ascii")


def access(module: AnsibleModule) -> Dict[str, Any]:
    """Make or remove the account and return what a kubeconfig needs."""
    parameters = module.params
    connection = api_connection(parameters, os.environ)
    client = ApiClient(connection, parameters["api_timeout"])
    account = Account(parameters["namespace"], parameters["name"])
    try:
        change = ensure if parameters["state"] == "present" else remove
        outcome = change(client, account, check=module.check_mode)
    finally:
        client.close()
    result: Dict[str, Any] = {
        "changed": bool(outcome.changes),
        "changes": list(outcome.changes),
        "server": client.host,
        "ca_data": _authority(connection),
    }
    if outcome.token is not None:
        result["token"] = outcome.token
    return result


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "namespace": {"type": "str", "default": "kube-system"},
            "name": {"type": "str", "default": "kubenode-proxy"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            **api_spec(),
        },
        supports_check_mode=True,
    )
    run(module, access)


if __name__ == "__main__":
    main()
