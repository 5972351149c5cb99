#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: agent_access
short_description: Create the agent's account in the cluster with minimal permissions
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Creates a ServiceAccount, and a ClusterRole and a Role with a binding each, all of the same name, and returns the
    data for a kubeconfig. M(kubenode.proxy.agent_token) issues the tokens for the nodes.
  - The account may list and watch Services, EndpointSlices, Nodes and ServiceCIDRs, create events, and create tokens
    for this ServiceAccount only, with which an agent renews its own token.
  - With O(shared_token=true), set C(no_log) on the task and on tasks that use its result, because the result contains
    the token.
extends_documentation_fragment:
  - kubenode.proxy.attributes.cluster
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  namespace:
    description: Namespace of the ServiceAccount, the Role and the Secret. It must exist.
    type: str
    default: kube-system
  name:
    description: Name of all objects.
    type: str
    default: kubenode-proxy
  shared_token:
    description:
      - Whether to also create a Secret with a token for all nodes that does not expire, and to return that token.
      - Anyone who reads the token on one node has the access of all nodes until the token is revoked with O(rotate).
    type: bool
    default: false
  rotate:
    description:
      - Whether to delete and recreate the ServiceAccount and the Secret, which revokes every token issued so far. Nodes
        lose their access until they get a new token; programmed rules on them remain.
      - Deleting only the Secret does not revoke its token permanently, because a recreated Secret has the same token.
    type: bool
    default: false
  network_policy:
    description:
      - Whether the account may also list and watch Pods, Namespaces, NetworkPolicies and ClusterNetworkPolicies, which
        an agent needs that enforces network policies.
    type: bool
    default: false
  allow_loopback:
    description:
      - Whether to accept a loopback address as the URL of the API server. On each node it refers to the node itself.
    type: bool
    default: true
  state:
    description:
      - V(absent) deletes the objects that this module created, which it identifies by a label. Every node that uses a
        token of the account loses its access.
    type: str
    choices: [present, absent]
    default: present
attributes:
  diff_mode:
    description: The result describes the changes in RV(changes).
    support: none
seealso:
  - module: kubenode.proxy.agent_token
"""

EXAMPLES = r"""
- name: Create the agent's account
  kubenode.proxy.agent_access:
    kubeconfig: ~/.kube/config
  register: access
  delegate_to: localhost
  run_once: true

- name: Revoke all tokens that were issued
  kubenode.proxy.agent_access:
    kubeconfig: ~/.kube/config
    rotate: true
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
changes:
  description: Descriptions of the changes.
  type: list
  elements: str
  returned: success
  sample: ["ServiceAccount kube-system/kubenode-proxy created"]
token:
  description: The bearer token of the Secret. Not returned in check mode if the Secret does not exist yet.
  type: str
  returned: O(shared_token) is true
  sample: eyJhbGciOi...
uid:
  description:
    - The UID of the ServiceAccount, which its tokens contain. Empty in check mode if the account does not exist yet.
  type: str
  returned: O(state) is V(present)
  sample: 4b1c8a0e-5f57-4a35-b2f5-0c8b7f4a7d11
server:
  description: URL of the API server that the module used.
  type: str
  returned: success
  sample: https://192.0.2.10:6443
ca_data:
  description:
    - Certificate authority of the API server, PEM encoded in base64. Empty if the system's authorities are used.
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
import ipaddress
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection, resolve
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import service_account
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_connection, api_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn


def _refuse_loopback(connection: ApiConnection) -> None:
    access = resolve(connection)
    host = access.address()[1]
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost" or host.endswith(".localhost")
    if loopback:
        raise ConfigurationError(
            f"server {access.server}: is a loopback address, which on each node refers to the node itself: give the URL"
            " by which the nodes reach the API server (agent_api_server of the role agent)"
        )


def _change(
    client: ApiClient, account: service_account.Account, parameters: dict[str, Any], check: bool
) -> service_account.AccountChange:
    if parameters["state"] == "absent":
        return service_account.remove(client, account, check=check)
    ended = service_account.rotate(client, account, check=check) if parameters["rotate"] else ()
    shared, policies = parameters["shared_token"], parameters["network_policy"]
    outcome = service_account.ensure(client, account, shared=shared, policies=policies, check=check)
    return outcome._replace(changes=(*ended, *outcome.changes))


def access(module: AnsibleModule) -> dict[str, Any]:
    """Create or remove the account and return the data for a kubeconfig."""
    parameters = module.params
    connection = api_connection(parameters, os.environ)
    if not parameters["allow_loopback"]:
        _refuse_loopback(connection)
    client = ApiClient(connection, parameters["api_timeout"])
    account = service_account.Account(parameters["namespace"], parameters["name"])
    try:
        outcome = _change(client, account, parameters, module.check_mode)
    finally:
        client.close()
    warn(module, outcome.warnings, ())
    result: dict[str, Any] = {
        "changed": bool(outcome.changes),
        "changes": list(outcome.changes),
        "server": client.host,
        "ca_data": base64.b64encode(resolve(connection).authority_pem()).decode("ascii"),
    }
    if parameters["state"] == "present":
        result["uid"] = outcome.uid
    if outcome.token is not None:
        result["token"] = outcome.token
    return result


_OPTIONS = {
    "namespace": {"type": "str", "default": "kube-system"},
    "name": {"type": "str", "default": "kubenode-proxy"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "shared_token": {"type": "bool", "default": False, "no_log": False},
    "network_policy": {"type": "bool", "default": False},
    "rotate": {"type": "bool", "default": False},
    "allow_loopback": {"type": "bool", "default": True},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(access, _OPTIONS)


if __name__ == "__main__":
    main()
