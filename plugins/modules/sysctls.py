#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: sysctls
short_description: Set kernel parameters now and at every boot
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Sets kernel parameters that differ, and writes a C(sysctl.d) file so that they are set at boot.
  - The parameters are listed, or derived from the mode of a service proxy, the kernel version and the number of cores,
    as kube-proxy derives them, or both. Each derived value is explained in the result and in the file.
  - Values may be written in each form that the kernel accepts, such as C(0x3) for 3, or C(8080,8081) for C(8080-8081).
    If the kernel changes a value in another way, such as by rounding it, the task sets the previous value again and
    fails with the value that the kernel made of it.
  - If a parameter cannot be set (because the kernel does not have it, or because it must not be changed in a container
    or network namespace), the task fails before changing anything and suggests a remedy.
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  values:
    description:
      - Kernel parameters by key. Keys are written as for C(sysctl), with dots or slashes.
      - A value given here takes precedence over O(profile). With V(null) a parameter of O(profile) is not changed.
    type: dict
    default: {}
  profile:
    description:
      - Also set the parameters that a service proxy needs.
    type: dict
    suboptions:
      mode:
        description:
          - Mode of the service proxy. Takes precedence over that of O(profile.configuration).
          - V(none) is for a node that only enforces network policies, which need no parameters.
        type: str
        choices: [iptables, ipvs, nftables, userspace, none]
      configuration:
        description:
          - A KubeProxyConfiguration from which to take the mode, strict ARP, C(route_localnet) and connection tracking,
            as the service proxy does when it starts. The other options of O(profile) take precedence.
          - The module does not know the Node of the host. Where C(nodePortAddresses) contains C(primary), it assumes a
            Node with an address of each IP family, so that C(primary) excludes 127.0.0.1. With a Node without an IPv4
            address it does not, and the service proxy sets C(route_localnet) itself.
        type: dict
      strict_arp:
        description:
          - In mode V(ipvs), whether to ignore ARP requests for addresses that only C(kube-ipvs0) has
            (C(ipvs.strictARP)). Defaults to V(false).
        type: bool
      route_localnet:
        description:
          - In mode V(iptables), whether node ports are reachable on 127.0.0.1 (C(iptables.localhostNodePorts)).
            Defaults to V(true).
        type: bool
      estimation:
        description:
          - In mode V(ipvs), whether the kernel computes rates for every virtual and real server (kernel 5.16 and
            later). With many servers this costs CPU time, and it delays packets before kernel 6.2. Not changed if not
            given.
        type: bool
      bridge_netfilter:
        description: Whether iptables processes bridged traffic. Requires the module C(br_netfilter).
        type: bool
        default: false
      netdev_max_backlog:
        description:
          - Length of the input packet queue of each CPU (C(net.core.netdev_max_backlog)). A larger value is not
            changed.
          - All traffic from pods passes this queue, and its default length of 1000 overflows in bursts. The second
            column of C(/proc/net/softnet_stat) counts the dropped packets. Not changed if not given.
        type: int
      reserved_node_ports:
        description:
          - Ports that the kernel does not assign automatically (C(net.ipv4.ip_local_reserved_ports)), in addition to
            those already reserved. Give the cluster's node-port range if it overlaps C(net.ipv4.ip_local_port_range). A
            program that is assigned a node port receives no packets on it, because they are sent to the Service.
            Masquerading ignores this setting. Not changed if not given.
        type: str
      conntrack:
        description:
          - Connection tracking, as in the C(conntrack) section of a KubeProxyConfiguration, with its defaults. Times
            are in seconds; with V(0) the kernel's value is not changed.
        type: dict
        suboptions:
          max_per_core:
            description: Entries of the table per core. With V(0) the size of the table is not changed.
            type: int
            default: 32768
          min:
            description: Minimum number of entries.
            type: int
            default: 131072
          tcp_established_timeout:
            description: How long an idle TCP connection is remembered.
            type: int
            default: 86400
          tcp_close_wait_timeout:
            description: How long a TCP connection in CLOSE_WAIT is remembered.
            type: int
            default: 3600
          udp_timeout:
            description: How long an unanswered UDP flow is remembered.
            type: int
            default: 0
          udp_stream_timeout:
            description: How long an answered UDP flow is remembered.
            type: int
            default: 0
          tcp_be_liberal:
            description: Whether to accept TCP packets outside the window instead of marking them as invalid.
            type: bool
            default: false
  state:
    description:
      - V(present) sets the values and, with O(persistent), writes O(persistent_file).
      - V(absent) removes O(persistent_file), with O(persistent). Running values are not changed.
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
      - The file that sets the values at boot. The task replaces the whole file, so each task needs its own. It fails
        if another program or an administrator has written the file.
      - With O(profile), the default is C(/etc/sysctl.d/99-kubenode-proxy.conf), the file of the service proxy. Without
        O(profile), either this option or O(persistent=false) is required, so that no task replaces that file by
        mistake.
      - Its name must end in C(.conf), or no program reads it. A warning says if it is not read at boot because of its
        directory, or because a file with its name in an earlier directory takes its place.
      - A warning names each file that is read later during boot and sets a different value.
    type: path
  unchangeable:
    description:
      - What to do if a parameter differs but cannot be changed, because the host is a container or a network namespace.
    type: str
    choices: [fail, warn]
    default: fail
seealso:
  - module: kubenode.proxy.sysctls_info
  - module: kubenode.proxy.kernel_modules
  - module: ansible.posix.sysctl
"""

EXAMPLES = r"""
- name: Set what a service proxy in IPVS mode needs, as kube-proxy would
  kubenode.proxy.sysctls:
    profile:
      mode: ipvs
      strict_arp: true
      conntrack:
        max_per_core: 65536
      netdev_max_backlog: 16384
      reserved_node_ports: 30000-32767

- name: Set individual values until the next reboot only
  kubenode.proxy.sysctls:
    values:
      net.ipv4.ip_forward: 1
      net.ipv4.conf.all.rp_filter: 2
    persistent: false

- name: Set a profile except for one of its parameters
  kubenode.proxy.sysctls:
    profile:
      mode: iptables
    values:
      net.netfilter.nf_conntrack_tcp_timeout_established:

- name: Set individual values, with a separate file
  kubenode.proxy.sysctls:
    values:
      net.ipv4.tcp_syncookies: 1
    persistent_file: /etc/sysctl.d/50-web.conf

- name: No longer set the values at boot
  kubenode.proxy.sysctls:
    state: absent
    persistent_file: /etc/sysctl.d/50-web.conf
"""

RETURN = r"""
sysctls:
  description: The running values after the task, by key. In check mode, the values that would be set.
  returned: success
  type: dict
  sample:
    net.ipv4.ip_forward: "1"
keys_set:
  description:
    - The parameters that the task has changed, also if it fails at a later one or at O(persistent_file). In check mode,
      those that it would change.
  returned: success, and failure after the options have been accepted
  type: list
  elements: str
  sample: [net.ipv4.ip_forward]
explanations:
  description: Why each parameter of O(profile) is set or not changed.
  returned: success
  type: list
  elements: dict
  contains:
    key:
      description: Key of the parameter.
      type: str
      returned: always
    value:
      description: The value to set. Empty if the parameter is not changed; starts with C(>=) if larger values are kept.
      type: str
      returned: always
    why:
      description: The reason.
      type: str
      returned: always
  sample:
    - key: net.ipv4.vs.conn_reuse_mode
      value: ""
      why: "not changed: since kernel 5.9 (here 6.1) the default reschedules a reused port without loss"
persistent_file:
  description: The file for the next boot. Empty with O(persistent=false).
  returned: success
  type: str
  sample: /etc/sysctl.d/99-kubenode-proxy.conf
unchanged_here:
  description: Parameters that could not be changed, each with the reason; see O(unchangeable).
  returned: success
  type: dict
  sample: {}
cores:
  description: Cores of the node, as kube-proxy counts them.
  returned: success
  type: int
  sample: 8
changes:
  description: The differences by table. At most 50 entries are named per table.
  returned: success
  type: list
  elements: dict
  contains:
    table:
      description: Name of the table, V(sysctls) or V(files).
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
    - table: sysctls
      added: 0
      replaced: 1
      removed: 0
      entries: [net.ipv4.ip_forward]
      truncated: false
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

from functools import partial
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.base.mode_names import MODES_IN_EFFECT
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import ConntrackConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.sysctls import carry_out, plan_absent, plan_present
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.files import refuse_unwritable
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import sysctl_files
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import tables
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import alone, run
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.own_file import own_file, unread_warnings

_PROXY_FILE = "/etc/sysctl.d/99-kubenode-proxy.conf"

_CONNTRACK_SPEC: dict[str, dict[str, Any]] = {
    name: {"type": "bool" if isinstance(default, bool) else "int", "default": default}
    for name, default in ConntrackConfiguration().options().items()
}


@alone
def _changed(module: AnsibleModule, known: dict[str, Any]) -> dict[str, Any]:
    """Make the parameters and their file as declared and return the result. Raises ProxyError.

    ``known`` gets what is part of the result even if this fails: which parameters have been set.
    """
    parameters = module.params
    present = parameters["state"] == "present"
    if present and not parameters["values"] and not parameters["profile"]:
        raise ConfigurationError("state is present but values is empty and profile is not given")
    cores = facts.cores()
    path = own_file(parameters, "profile", _PROXY_FILE, parameters["persistent"])
    chosen = plan_present(parameters, cores, module.check_mode, path) if present else plan_absent(path)
    kept = refuse_unwritable(chosen.planned)
    unread = unread_warnings(("persistent_file", path, sysctl_files.unread(path))) if present else []
    for warning in [*kept, *chosen.warnings, *unread]:
        module.warn(warning)
    known["keys_set"] = chosen.keys_set
    try:
        running = chosen.running if module.check_mode else carry_out(chosen)
    finally:
        known["changed"] = bool(chosen.keys_set)
    return {
        "sysctls": running,
        "explanations": chosen.explanations,
        "persistent_file": path,
        "unchanged_here": chosen.unchanged_here,
        "cores": cores,
        **tables.planned_result(chosen.planned, module._diff),
    }


_OPTIONS = {
    "values": {"type": "dict", "default": {}},
    "profile": {
        "type": "dict",
        "required_one_of": [["mode", "configuration"]],
        "options": {
            "mode": {"type": "str", "choices": [*MODES_IN_EFFECT]},
            "configuration": {"type": "dict"},
            "strict_arp": {"type": "bool"},
            "route_localnet": {"type": "bool"},
            "estimation": {"type": "bool"},
            "bridge_netfilter": {"type": "bool", "default": False},
            "netdev_max_backlog": {"type": "int"},
            "reserved_node_ports": {"type": "str"},
            "conntrack": {"type": "dict", "options": _CONNTRACK_SPEC},
        },
    },
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "persistent": {"type": "bool", "default": True},
    "persistent_file": {"type": "path"},
    "unchangeable": {"type": "str", "choices": ["fail", "warn"], "default": "fail"},
}


def main() -> None:
    """Run the module."""
    known: dict[str, Any] = {"changed": False, "keys_set": []}
    run(partial(_changed, known=known), _OPTIONS, lambda _module: known, needs_root="changing kernel parameters")


if __name__ == "__main__":
    main()
