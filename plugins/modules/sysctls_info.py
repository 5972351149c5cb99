#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: sysctls_info
short_description: Read kernel parameters and what sets them at boot
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Reads the current values of kernel parameters, and the values that the files of C(sysctl.d) set at boot, in the
    order in which C(systemd-sysctl) reads them. C(/etc/sysctl.conf) counts through a link in one of their directories,
    and on hosts without systemd as the last file.
  - Does not need root, unless only root may read a parameter.
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes
options:
  keys:
    description: Kernel parameters, written as for C(sysctl), with dots or slashes.
    type: list
    elements: str
    required: true
seealso:
  - module: kubenode.proxy.sysctls
"""

EXAMPLES = r"""
- name: Read two parameters
  kubenode.proxy.sysctls_info:
    keys: [net.ipv4.ip_forward, net.netfilter.nf_conntrack_max]
  register: parameters

- name: Check that forwarding survives a reboot
  ansible.builtin.assert:
    that: parameters.sysctls['net.ipv4.ip_forward'].boot_value == '1'
"""

RETURN = r"""
sysctls:
  description: A dictionary for each key.
  returned: success
  type: dict
  contains:
    value:
      description: Current value. Empty if it has none yet, V(null) if the kernel has no such parameter.
      type: str
      returned: always
      sample: "1"
    boot_value:
      description: Value that is set at boot. V(null) if no file sets it.
      type: str
      returned: always
      sample: "1"
    boot_file:
      description: The file that sets it, the last one if several do. Empty if none does.
      type: str
      returned: always
      sample: /etc/sysctl.d/99-kubenode-proxy.conf
  sample:
    net.ipv4.ip_forward: {value: "1", boot_value: "1", boot_file: /etc/sysctl.d/99-kubenode-proxy.conf}
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: configuration
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctl_files import boot_values
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import canonical_key, read_value
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def _found(module: AnsibleModule) -> dict[str, Any]:
    """Return the result. Raises ProxyError."""
    found: dict[str, Any] = {}
    keys = [canonical_key(key) for key in module.params["keys"]]
    at_boot = boot_values(keys)
    for key in keys:
        boot = at_boot.get(key)
        found[key] = {
            "value": read_value(key),
            "boot_value": boot.value if boot else None,
            "boot_file": boot.file if boot else "",
        }
    return {"changed": False, "sysctls": found}


def main() -> None:
    """Run the module."""
    run(_found, {"keys": {"type": "list", "elements": "str", "required": True, "no_log": False}})


if __name__ == "__main__":
    main()
