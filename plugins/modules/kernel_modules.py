#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kernel_modules
short_description: Load kernel modules now and at every boot
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Loads missing kernel modules, and writes a C(modules-load.d) file so that they are loaded at boot.
  - The modules are listed, or derived from the mode of a service proxy and the IPVS schedulers in use, or both.
  - Modules that are built into the kernel count as loaded.
  - Parameters of modules are given when a module is loaded, now and at boot. Parameters of a module that is loaded
    already, or built into the kernel, are changed in place where the kernel allows that.
  - At boot, only C(MODULE.PARAMETER=VALUE) on the kernel's command line sets a parameter of a module that is built into
    the kernel. This module does not change the command line, and warns if it does not have the value.
  - If the running kernel does not have a module, the task fails before changing anything and suggests a remedy.
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  modules:
    description:
      - Names of kernel modules. V(-) in a name is equivalent to V(_).
    type: list
    elements: str
    default: []
  mode:
    description:
      - Also load the modules that a service proxy in this mode needs, except for match and target extensions of
        iptables, which the kernel loads when a rule uses them.
      - V(none) is for a node that only enforces network policies.
    type: str
    choices: [iptables, ipvs, nftables, userspace, none]
  schedulers:
    description:
      - IPVS schedulers in use. The module of each is loaded, such as C(ip_vs_wlc) for V(wlc).
      - Only with O(mode=ipvs), where the default is V([rr]).
    type: list
    elements: str
    default: []
  ipvs_filter_backend:
    description:
      - What filters and masquerades beside IPVS. V(nftables) needs the modules of neither ipset nor iptables.
      - If not given, V(iptables) is loaded, and O(unload=true) unloads the modules of both. What a service proxy with
        C(ipvsFilterBackend) V(auto) uses is a result of M(kubenode.proxy.kernel_modules_info).
      - Only with O(mode=ipvs).
    type: str
    choices: [iptables, nftables]
  bridge_netfilter:
    description:
      - With O(mode), also load C(br_netfilter), which pods on the same bridge need to reach each other through a
        Service.
    type: bool
    default: false
  parameters:
    description:
      - Parameters by module, such as C(conn_tab_bits) of C(ip_vs). Modules that are named here and are neither in
        O(modules) nor selected by O(mode) are not loaded; their parameters take effect when something else loads them.
      - With O(persistent), they are written to O(parameters_file), which has no effect on modules that are built into
        the kernel.
      - A parameter that the module declares and the kernel does not show, such as C(numdummies) of C(dummy), counts as
        set once the module is loaded. The task warns unless an earlier run has written it to O(parameters_file).
    type: dict
    default: {}
  unchangeable:
    description:
      - What happens if a parameter of a module that is in the kernel can only be set when it is loaded. With V(fail)
        the task fails before changing anything. With V(warn) it warns, and the parameter takes effect when the module
        is loaded again, at the latest after a reboot. One of a module that is built into the kernel takes effect by the
        kernel's command line only.
    type: str
    choices: [fail, warn]
    default: fail
  state:
    description:
      - V(present) loads the modules and, with O(persistent), writes O(persistent_file) and O(parameters_file).
      - V(absent) removes O(persistent_file) and, with O(parameters), O(parameters_file). Modules remain loaded unless
        O(unload=true).
      - V(absent) keeps a file whose first line this collection has not written, with a warning.
    type: str
    choices: [present, absent]
    default: present
  persistent:
    description:
      - Whether to write O(persistent_file). With V(false) an existing file is not changed.
    type: bool
    default: true
  persistent_file:
    description:
      - The file that lists the modules to load at boot. The task replaces the whole file, so each task needs its own.
        It fails if another program or an administrator has written the file.
      - With O(mode), the default is C(/etc/modules-load.d/kubenode-proxy.conf), the file of the service proxy. Without
        O(mode), either this option or O(persistent=false) is required, so that no task replaces that file by mistake.
      - Its name must end in C(.conf), or no program reads it. A warning says if it is not read at boot because of its
        directory, or because a file with its name in an earlier directory takes its place.
    type: path
  parameters_file:
    description:
      - The file for O(parameters). The task replaces the whole file. Defaults to the file in C(/etc/modprobe.d) with
        the name of O(persistent_file). Its name and directory are checked like those of O(persistent_file).
    type: path
  unload:
    description:
      - With O(state=absent), unload the modules that O(modules) and O(mode) select, or without these options, those
        listed in O(persistent_file), and then remove the files. Modules that use others are unloaded first.
      - Other modules stay loaded, those included that were loaded only because the unloaded ones use them.
      - If a module has users besides these modules, the task fails before changing anything.
    type: bool
    default: false
seealso:
  - module: kubenode.proxy.kernel_modules_info
  - module: kubenode.proxy.sysctls
  - module: community.general.modprobe
"""

EXAMPLES = r"""
- name: Load everything that a service proxy in IPVS mode with two schedulers needs
  kubenode.proxy.kernel_modules:
    mode: ipvs
    schedulers: [rr, wlc]

- name: Load modules by name until the next reboot only
  kubenode.proxy.kernel_modules:
    modules: [br_netfilter, overlay]
    persistent: false

- name: Load modules by name, with a separate file
  kubenode.proxy.kernel_modules:
    modules: [8021q]
    persistent_file: /etc/modules-load.d/vlan.conf

- name: Load IPVS with a larger table of connections, now and at boot
  kubenode.proxy.kernel_modules:
    modules: [ip_vs]
    parameters:
      ip_vs:
        conn_tab_bits: 20
    persistent_file: /etc/modules-load.d/load-balancer.conf
    unchangeable: warn

- name: Unload the modules and no longer load them at boot
  kubenode.proxy.kernel_modules:
    state: absent
    unload: true
    persistent_file: /etc/modules-load.d/vlan.conf
"""

RETURN = r"""
modules:
  description: The kernel's names of the modules that the task selected, in loading order.
  returned: success
  type: list
  elements: str
  sample: [ip_vs, ip_vs_rr, nf_conntrack]
loaded:
  description: Modules that have been loaded, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [ip_vs_rr]
unloaded:
  description: Modules that have been unloaded, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: []
persistent_file:
  description: The file for the next boot. Empty with O(persistent=false).
  returned: success
  type: str
  sample: /etc/modules-load.d/kubenode-proxy.conf
parameters_file:
  description: The file for the parameters. Empty without O(parameters) and with O(persistent=false).
  returned: success
  type: str
  sample: /etc/modprobe.d/load-balancer.conf
kernel_release:
  description: Release of the running kernel.
  returned: success
  type: str
  sample: 6.1.0-13-amd64
changes:
  description: The differences by table. At most 50 entries are named per table.
  returned: success
  type: list
  elements: dict
  contains:
    table:
      description: Name of the table, V(modules), V(module parameters) or V(files).
      type: str
      returned: always
    added:
      description: Number of entries that were missing.
      type: int
      returned: always
    replaced:
      description: Number of entries that had a different value.
      type: int
      returned: always
    removed:
      description: Number of unexpected entries that were removed.
      type: int
      returned: always
    entries:
      description: Names of the first entries.
      type: list
      elements: str
      returned: always
    truncated:
      description: Whether there are more entries than those named.
      type: bool
      returned: always
  sample:
    - table: modules
      added: 1
      replaced: 0
      removed: 0
      entries: [ip_vs_rr]
      truncated: false
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.mode_names import MODES_IN_EFFECT
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.kernel_modules import changed

_OPTIONS = {
    "modules": {"type": "list", "elements": "str", "default": []},
    "mode": {"type": "str", "choices": [*MODES_IN_EFFECT]},
    "schedulers": {"type": "list", "elements": "str", "default": []},
    "ipvs_filter_backend": {"type": "str", "choices": ["iptables", "nftables"]},
    "bridge_netfilter": {"type": "bool", "default": False},
    "parameters": {"type": "dict", "default": {}},
    "unchangeable": {"type": "str", "choices": ["fail", "warn"], "default": "fail"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "persistent": {"type": "bool", "default": True},
    "persistent_file": {"type": "path"},
    "parameters_file": {"type": "path"},
    "unload": {"type": "bool", "default": False},
}


def main() -> None:
    """Run the module."""
    run(changed, _OPTIONS, needs_root="changing kernel modules")


if __name__ == "__main__":
    main()
