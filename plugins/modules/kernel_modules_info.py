#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kernel_modules_info
short_description: Show which kernel modules are loaded, and their parameters
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Shows for each kernel module whether its code is in the kernel, loaded or built in, and the values of its
    parameters.
  - Needs root to show parameters that only root may read.
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes
options:
  modules:
    description: Names of kernel modules. V(-) in a name is equivalent to V(_).
    type: list
    elements: str
    required: true
  ipvs_filter_backend:
    description:
      - Also return what filters and masquerades beside IPVS if a service proxy runs here in ipvs mode with
        C(ipvsFilterBackend) V(auto). Needs root.
    type: bool
    default: false
  schedulers:
    description: IPVS schedulers in use, with O(ipvs_filter_backend).
    type: list
    elements: str
    default: [rr]
seealso:
  - module: kubenode.proxy.kernel_modules
"""

EXAMPLES = r"""
- name: Show the size of the connection table of IPVS
  kubenode.proxy.kernel_modules_info:
    modules: [ip_vs]
  register: kernel

- name: Show it
  ansible.builtin.debug:
    msg: "{{ kernel.modules.ip_vs.parameters.conn_tab_bits }}"
"""

RETURN = r"""
modules:
  description: A dictionary for each module, by the name that the kernel uses.
  returned: success
  type: dict
  contains:
    present:
      description: Whether the code is in the kernel, loaded or built in.
      type: bool
      returned: always
      sample: true
    loaded:
      description: Whether it is loaded as a module.
      type: bool
      returned: always
      sample: true
    installed:
      description: Whether the module is installed for the running kernel, so that it could be loaded.
      type: bool
      returned: always
      sample: true
    users:
      description: Number of users of the loaded module.
      type: int
      returned: always
      sample: 2
    parameters:
      description: Values of the parameters that the kernel shows.
      type: dict
      returned: always
      sample: {conn_tab_bits: "12"}
  sample:
    ip_vs: {present: true, loaded: true, installed: true, users: 2, parameters: {conn_tab_bits: "12"}}
ipvs_filter_backend:
  description:
    - The one in use, otherwise V(nftables) if supported, otherwise V(iptables).
  returned: O(ipvs_filter_backend=true)
  type: str
  sample: nftables
ipvs_filter_backend_reason:
  description: Why.
  returned: O(ipvs_filter_backend=true)
  type: str
  sample: "filter backend nftables: this node meets its requirements"
kernel_release:
  description: Release of the running kernel.
  returned: success
  type: str
  sample: 6.1.0-13-amd64
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: configuration
"""

from typing import Any, Sequence

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import modules
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.module_parameters import shown_parameters
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def _ipvs_filter_backend(schedulers: Sequence[str]) -> dict[str, str]:
    # Imported late: seldom needed.
    from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import (
        automatic_filter_backend,
    )

    chosen = automatic_filter_backend(schedulers)
    return {"ipvs_filter_backend": chosen.mode.filter_backend, "ipvs_filter_backend_reason": chosen.reason}


def _found(module: AnsibleModule) -> dict[str, Any]:
    """Return the result. Raises ProxyError."""
    release = facts.kernel_release()
    names = [modules.canonical_name(name) for name in module.params["modules"]]
    present, loaded, installed = (
        modules.present_modules(names, release),
        modules.loaded_modules(),
        modules.available_modules(release),
    )
    found = {
        name: {
            "present": name in present,
            "loaded": name in loaded,
            "installed": name in installed,
            "users": loaded.get(name, 0),
            "parameters": shown_parameters(name),
        }
        for name in names
    }
    more = _ipvs_filter_backend(module.params["schedulers"]) if module.params["ipvs_filter_backend"] else {}
    return {"changed": False, "modules": found, "kernel_release": release, **more}


_OPTIONS = {
    "modules": {"type": "list", "elements": "str", "required": True},
    "ipvs_filter_backend": {"type": "bool", "default": False},
    "schedulers": {"type": "list", "elements": "str", "default": ["rr"]},
}


def main() -> None:
    """Run the module."""
    run(_found, _OPTIONS)


if __name__ == "__main__":
    main()
