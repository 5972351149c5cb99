#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: agent_token
short_description: Request a token of the agent's account for one node
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Returns a token of the ServiceAccount that M(kubenode.proxy.agent_access) creates. The token expires, and it is
    bound to the Node, so that it becomes invalid when the Node object is deleted. It is an error if the ServiceAccount
    does not exist.
  - API servers before 1.31 cannot bind a token to a Node. For API servers before 1.22, which lack TokenRequest, the
    module creates a Secret with a token that does not expire. A warning reports either case.
  - Each call issues a new token. The role P(kubenode.proxy.agent#role) calls the module for nodes that have no token,
    or one that must be renewed. Agents renew their own tokens at half the lifetime.
  - Set C(no_log) on the task, because the result contains the token.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  namespace:
    description: Namespace of the ServiceAccount.
    type: str
    default: kube-system
  name:
    description: Name of the ServiceAccount.
    type: str
    default: kubenode-proxy
  node_name:
    description: Name of the Node.
    type: str
    required: true
  lifetime_seconds:
    description: Lifetime of the token, at least 600. The API server may shorten it.
    type: int
    default: 86400
attributes:
  check_mode:
    description: Requests no token and returns none.
    support: full
  diff_mode:
    description: The result is a secret.
    support: none
seealso:
  - module: kubenode.proxy.agent_access
"""

EXAMPLES = r"""
- name: Request a token for each node
  kubenode.proxy.agent_token:
    kubeconfig: ~/.kube/config
    node_name: "{{ inventory_hostname }}"
  register: access
  no_log: true
  delegate_to: localhost
"""

RETURN = r"""
token:
  description: The bearer token.
  type: str
  returned: not in check mode
  sample: eyJhbGciOi...
error_kind:
  description: The kind of failure, V(api) or V(configuration).
  type: str
  returned: failure
  sample: api
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.service_token import LEAST_SECONDS
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.service_account import Account, node_token
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_spec, connected
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn


def token(module: AnsibleModule) -> dict[str, Any]:
    """Request a token and return it."""
    parameters = module.params
    seconds = parameters["lifetime_seconds"]
    if seconds < LEAST_SECONDS:
        raise ConfigurationError(f"lifetime_seconds: {seconds} is less than {LEAST_SECONDS}")
    if module.check_mode:
        return {"changed": True}
    account = Account(parameters["namespace"], parameters["name"])
    with connected(module) as client:
        found = node_token(client, account, parameters["node_name"], seconds)
    warn(module, found.warnings, ())
    return {"changed": True, "token": found.token}


_OPTIONS = {
    "namespace": {"type": "str", "default": "kube-system"},
    "name": {"type": "str", "default": "kubenode-proxy"},
    "node_name": {"type": "str", "required": True},
    "lifetime_seconds": {"type": "int", "default": 86400},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(token, _OPTIONS)


if __name__ == "__main__":
    main()
