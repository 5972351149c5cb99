#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kube_proxy_configuration
short_description: Compare kube-proxy's configuration in the cluster with that of hosts
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Reads kube-proxy's configuration from its ConfigMap, and compares it field by field with the configurations with
    which hosts are about to serve instead.
  - It fails if a field that changes traffic differs and a host's configuration does not set it. The mode is not
    compared, nor is what only concerns kube-proxy itself, such as its credentials.
  - The playbook kubenode.proxy.migrate uses it before any host is touched.
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes.api
  - kubenode.proxy.attributes
  - kubenode.proxy.kubernetes_api
options:
  configurations:
    description: The KubeProxyConfiguration of each host, by the name of the host.
    type: dict
    default: {}
  differences:
    description: Whether a field that differs is an error, V(fail), or a warning, V(warn).
    type: str
    choices: [fail, warn]
    default: fail
  namespace:
    description: Namespace of the ConfigMap and of the DaemonSet.
    type: str
    default: kube-system
  name:
    description:
      - Name of kube-proxy's DaemonSet. The ConfigMap of the same name is read, or if there is none, one that the
        DaemonSet mounts.
      - In it C(config.conf) is read, as kubeadm writes it, or else the only entry with a KubeProxyConfiguration.
    type: str
    default: kube-proxy
notes:
  - Requires permission to get the ConfigMap, and the DaemonSet if it mounts one of another name.
  - Command-line flags of kube-proxy, as k3s has them, are not read.
seealso:
  - module: kubenode.proxy.kube_proxy_placement
"""

EXAMPLES = r"""
- name: Compare kube-proxy's configuration with that of the nodes
  kubenode.proxy.kube_proxy_configuration:
    configurations:
      worker-1: {mode: nftables, clusterCIDR: 10.244.0.0/16}
    kubeconfig: ~/.kube/config
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
found:
  description: Whether the ConfigMap exists. If not, nothing is compared.
  type: bool
  returned: success
  sample: true
configuration:
  description:
    - The fields of kube-proxy's configuration that change traffic and differ from their defaults, and its mode. With
      these below its own fields, a host serves as kube-proxy does.
  type: dict
  returned: success
  sample: {clusterCIDR: 10.244.0.0/16, mode: iptables}
differences:
  description: The fields that differ, by the name of the host.
  type: dict
  returned: success
  sample:
    worker-1: ["conntrack.maxPerCore: kube-proxy has 0, the host none"]
error_kind:
  description: The kind of failure, V(api) or V(configuration).
  type: str
  returned: failure
  sample: configuration
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.comparison import adopted
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.kube_proxy_configuration import (
    ConfigMap,
    compared,
    find_configuration,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import api_spec, connected
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def comparison(module: AnsibleModule) -> dict[str, Any]:
    """Return kube-proxy's configuration and the differences. Raises ConfigurationError if they are not to be there."""
    parameters = module.params
    place = ConfigMap(parameters["namespace"], parameters["name"])
    with connected(module) as client:
        kube_proxy = find_configuration(client, place)
    if kube_proxy is None:
        module.warn(
            f"{place} does not exist, so kube-proxy's configuration is unknown; if it has flags instead, as in k3s, "
            "docs/distributions.md has the fields for them, and migrate_kube_proxy_mode is its mode for the way back"
        )
        return {"changed": False, "found": False, "configuration": {}, "differences": {}}
    found = compared(kube_proxy.fields, parameters["configurations"])
    for item in found:
        if item.text(chosen=True):
            module.warn(f"differs from kube-proxy's configuration, as set: {item.text(chosen=True)}")
    problems = [item.text(chosen=False) for item in found if item.text(chosen=False)]
    if problems and parameters["differences"] == "fail":
        raise ConfigurationError(
            f"the configuration differs from kube-proxy's ({kube_proxy.place}): {'; '.join(problems)}: "
            "set these fields in service_proxy_configuration, to other values if that is wanted, or adopt them: "
            "migrate_configuration=kube-proxy"
        )
    for problem in problems:
        module.warn(f"differs from kube-proxy's configuration: {problem}")
    return {
        "changed": False,
        "found": True,
        "configuration": adopted(kube_proxy.fields),
        "differences": {
            host: [str(field) for field in item.differences]
            for item in found
            for host in item.hosts
            if item.differences
        },
    }


_OPTIONS = {
    "configurations": {"type": "dict", "default": {}},
    "differences": {"type": "str", "choices": ["fail", "warn"], "default": "fail"},
    "namespace": {"type": "str", "default": "kube-system"},
    "name": {"type": "str", "default": "kube-proxy"},
    **api_spec(),
}


def main() -> None:
    """Run the module."""
    run(comparison, _OPTIONS)


if __name__ == "__main__":
    main()
