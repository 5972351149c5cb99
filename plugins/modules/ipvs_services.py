#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: ipvs_services
short_description: Manage IPVS virtual servers and their real servers
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Ensures that the listed virtual servers of the Linux Virtual Server (IPVS, LVS) and their real servers exist with
    the given settings. The changes are made over netlink, many per message.
  - Virtual servers that are not listed are not changed, unless their address is named in O(purge).
  - Settings are changed in place. Open connections of unchanged servers are not disturbed.
  - A task can declare all real servers of a virtual server, or with O(services[].exclusive=false) only some of them, so
    that each real server is added, drained and removed by a separate task.
notes:
  - The kernel needs the module C(ip_vs) and those of the schedulers; M(kubenode.proxy.kernel_modules) loads them.
  - The settings survive a reboot only with O(save=true).
  - The module does not check the health of real servers, and does not manage the synchronization daemon of IPVS;
    keepalived does both.
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  services:
    description:
      - The virtual servers.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Address of the virtual server, IPv4 or IPv6. Required without O(services[].firewall_mark).
        type: str
      port:
        description:
          - Port of the virtual server. Required without O(services[].firewall_mark). With V(0), which needs
            O(services[].persistence), all ports for which the address has no other virtual server.
        type: int
      protocol:
        description: Protocol of the virtual server. V(tcp) if not given.
        type: str
        choices: [tcp, udp, sctp]
      firewall_mark:
        description:
          - In place of address, port and protocol, the mark of the packets that the virtual server takes. Several
            addresses and ports that get the same mark, by C(-j MARK) of iptables, become one virtual server.
        type: int
      family:
        description: Family of the packets with O(services[].firewall_mark). V(ipv4) if not given.
        type: str
        choices: [ipv4, ipv6]
      scheduler:
        description:
          - Name of the scheduler, such as V(rr), V(wrr), V(lc), V(wlc), V(sh), V(mh), V(sed) or V(nq). V(wlc) if not
            given.
        type: str
      flags:
        description: Flags of the scheduler. None if not given.
        type: list
        elements: str
        choices: [sh-fallback, sh-port, mh-fallback, mh-port, flag-1, flag-2, flag-3]
      persistence:
        description: Seconds for which a client keeps its real server. V(0) disables persistence, as if not given.
        type: int
      persistence_prefix:
        description:
          - With C(persistence), length in bits of the prefix by which clients are grouped. If not given, clients are
            not grouped.
        type: int
      one_packet:
        description: For protocol V(udp), whether to schedule every packet separately. V(false) if not given.
        type: bool
      exclusive:
        description:
          - Whether real servers that are not listed are removed.
          - With V(false) and without O(services[].scheduler), O(services[].flags), O(services[].persistence),
            O(services[].persistence_prefix) and O(services[].one_packet), an existing virtual server keeps its settings
            as well, so that the task of a real server need not repeat them. If all listed real servers are
            V(absent), such a virtual server is not created if it does not exist.
        type: bool
        default: true
      real_servers:
        description:
          - The real servers. With O(services[].exclusive=true) all others of the virtual server are removed. If not
            given, they are not changed.
        type: list
        elements: dict
        suboptions:
          address:
            description: Address of the real server.
            type: str
            required: true
          port:
            description:
              - Port of the real server. Defaults to that of the virtual server, or with O(services[].firewall_mark) or
                port V(0) to the port to which the packet was sent. Only V(nat) allows another.
            type: int
          weight:
            description: Weight. With V(0) the real server gets no new connections and keeps its existing ones.
            type: int
            default: 1
          forwarding:
            description: Whether packets reach the real server by address translation, direct routing or a tunnel.
            type: str
            choices: [nat, dr, tunnel]
            default: nat
          state:
            description:
              - With V(absent) the real server is removed. Its connections end; to let them end by themselves, set
                weight V(0) first and wait, as the example of M(kubenode.proxy.ipvs_services_info) does.
            type: str
            choices: [present, absent]
            default: present
  purge:
    description:
      - Addresses on which virtual servers that are not listed are removed.
    type: list
    elements: str
    default: []
  timeouts:
    description:
      - Seconds after which the kernel forgets an idle connection. Those that are not given are not changed.
    type: dict
    suboptions:
      tcp:
        description: An established TCP connection.
        type: int
      tcp_fin:
        description: A TCP connection after its FIN.
        type: int
      udp:
        description: UDP packets between the same two ports.
        type: int
  save:
    description:
      - Whether to write all virtual servers, real servers and timeouts of the kernel, those of other programs included,
        to O(save_file), as C(ipvsadm-save -n) prints them. Thresholds, persistence engines and types of tunnels, which
        other programs may have set, are not saved.
      - Tasks that save do so one after the other, each with what the kernel has after its change. So tasks of several
        hosts may be delegated to one load balancer at the same time.
      - The service C(ipvsadm) of the distribution loads the file at boot. It must be enabled; on Debian, where it is a
        part of the package C(ipvsadm), C(/etc/default/ipvsadm) must also contain C(AUTO=true).
      - On RHEL and its relatives, O(timeouts) are lost at the first reboot. The unit of their service C(ipvsadm) writes
        the file again when it stops, with C(ipvsadm-save -n), which saves no timeouts. Set them there by a task that
        runs after each boot.
    type: bool
    default: false
  save_file:
    description:
      - The file for O(save). Defaults to C(/etc/sysconfig/ipvsadm) on hosts with a directory C(/etc/sysconfig), and to
        C(/etc/ipvsadm.rules) on others.
    type: path
  state:
    description:
      - With V(absent) the listed virtual servers are removed together with their real servers. To remove single real
        servers, use O(services[].real_servers[].state).
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: kubenode.proxy.ipvs_services_info
  - module: kubenode.proxy.kernel_modules
  - module: kubenode.proxy.sysctls
"""

EXAMPLES = r"""
- name: Balance two web servers behind one address by weight
  kubenode.proxy.ipvs_services:
    services:
      - address: 192.0.2.10
        port: 443
        scheduler: wrr
        persistence: 300
        real_servers:
          - address: 10.0.0.21
            port: 8443
            weight: 3
          - address: 10.0.0.22
            port: 8443

- name: Drain a real server
  kubenode.proxy.ipvs_services:
    services:
      - address: 192.0.2.10
        port: 443
        scheduler: wrr
        persistence: 300
        real_servers:
          - address: 10.0.0.21
            port: 8443
            weight: 3
          - address: 10.0.0.22
            port: 8443
            weight: 0

- name: Add this host to the real servers of a virtual server on each load balancer
  kubenode.proxy.ipvs_services:
    services:
      - address: 192.0.2.10
        port: 443
        exclusive: false
        real_servers:
          - address: "{{ ansible_default_ipv4.address }}"
            port: 8443
            weight: 3
  delegate_to: "{{ item }}"
  loop: "{{ groups.load_balancers }}"

- name: Balance HTTP and HTTPS together, whose packets the firewall marks with 1
  kubenode.proxy.ipvs_services:
    services:
      - firewall_mark: 1
        persistence: 600
        real_servers:
          - address: 10.0.0.21
            forwarding: dr
          - address: 10.0.0.22
            forwarding: dr

- name: Remember idle connections for an hour, and keep everything over a reboot
  kubenode.proxy.ipvs_services:
    timeouts:
      tcp: 3600
      udp: 60
    save: true

- name: Have exactly one virtual server on this address
  kubenode.proxy.ipvs_services:
    services:
      - address: 2001:db8::10
        port: 53
        protocol: udp
        scheduler: sh
        real_servers:
          - address: 2001:db8:1::53
            forwarding: dr
    purge:
      - 2001:db8::10
"""

RETURN = r"""
virtual_servers:
  description: Number of virtual servers that were listed.
  returned: success
  type: int
  sample: 1
real_servers:
  description: Number of real servers that were listed.
  returned: success
  type: int
  sample: 2
save_file:
  description: The file that O(save) names or that it defaults to. Empty without O(save).
  returned: success
  type: str
  sample: /etc/ipvsadm.rules
changes:
  description: The differences by table. At most 50 entries are named per table.
  returned: success
  type: list
  elements: dict
  contains:
    table:
      description: Name of the table.
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
    - table: IPv4 real servers
      added: 1
      replaced: 0
      removed: 0
      entries: ["192.0.2.10:443/TCP/10.0.0.21:8443"]
      truncated: false
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

import os
from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.base.ipvs_schedulers import SCHEDULER_FLAGS
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import ipvs_services as ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.ipvs_saving import change, predict
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import tables
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange

_SAVE_DIRECTORY = "/etc/sysconfig"


def _server(options: Mapping[str, Any]) -> ipvs.ListedServer:
    real_servers = options["real_servers"]
    if real_servers is not None:
        real_servers = tuple(
            ipvs.ListedReal(
                real["address"], real["port"], real["weight"], real["forwarding"], real["state"] == "present"
            )
            for real in real_servers
        )
    flags = None if options["flags"] is None else tuple(options["flags"])
    return ipvs.ListedServer(**{**options, "flags": flags, "real_servers": real_servers})


def _save_file(parameters: Mapping[str, Any]) -> str:
    if not parameters["save"]:
        return ""
    default = f"{_SAVE_DIRECTORY}/ipvsadm" if os.path.isdir(_SAVE_DIRECTORY) else "/etc/ipvsadm.rules"
    return str(parameters["save_file"] or default)


def _planned(parameters: Mapping[str, Any], wanted: ipvs.ListedTables, path: str, check: bool) -> list[PlannedChange]:
    """Plan and, unless ``check`` is set, apply all changes; ``path``: the file to write, empty for none."""
    purge = ipvs.purged_addresses(parameters["purge"])
    timeouts = ipvs.listed_timeouts(parameters["timeouts"] or {})
    present = parameters["state"] == "present"
    problem = ipvs.unavailable_schedulers(wanted) if present else ""
    if problem:
        raise KernelError(problem)
    families = FAMILIES if path else ()
    with ipvs.connect() as connection:
        declared = ipvs.stages(connection, wanted, purge=purge, present=present, timeouts=timeouts, families=families)
        return predict(connection, declared, path, timeouts) if check else change(connection, declared, path)


def changed(module: AnsibleModule) -> dict[str, Any]:
    """Make the virtual servers as declared and return the result. Raises ProxyError."""
    parameters = module.params
    if not any(parameters[name] for name in ("services", "purge", "timeouts", "save")):
        raise ConfigurationError("services, purge, timeouts and save are all empty: nothing to do")
    path = _save_file(parameters)
    wanted = ipvs.listed_tables(_server(options) for options in parameters["services"])
    if wanted.absent and parameters["state"] == "absent":
        raise ConfigurationError("state: absent removes whole virtual servers; their real servers need no state")
    planned = _planned(parameters, wanted, path, bool(module.check_mode))
    return {
        "virtual_servers": len(wanted.servers),
        "real_servers": len(wanted.real_servers),
        "save_file": path,
        **tables.planned_result(planned, module._diff),
    }


_REAL_SERVER = {
    "address": {"type": "str", "required": True},
    "port": {"type": "int"},
    "weight": {"type": "int", "default": 1},
    "forwarding": {"type": "str", "choices": ["nat", "dr", "tunnel"], "default": "nat"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
_SERVICE = {
    "address": {"type": "str"},
    "port": {"type": "int"},
    "protocol": {"type": "str", "choices": ["tcp", "udp", "sctp"]},
    "firewall_mark": {"type": "int"},
    "family": {"type": "str", "choices": ["ipv4", "ipv6"]},
    "scheduler": {"type": "str"},
    "flags": {"type": "list", "elements": "str", "choices": list(SCHEDULER_FLAGS)},
    "persistence": {"type": "int"},
    "persistence_prefix": {"type": "int"},
    "one_packet": {"type": "bool"},
    "exclusive": {"type": "bool", "default": True},
    "real_servers": {"type": "list", "elements": "dict", "options": _REAL_SERVER},
}
_TIMEOUTS = {"tcp": {"type": "int"}, "tcp_fin": {"type": "int"}, "udp": {"type": "int"}}
_OPTIONS = {
    "services": {"type": "list", "elements": "dict", "default": [], "options": _SERVICE},
    "purge": {"type": "list", "elements": "str", "default": []},
    "timeouts": {"type": "dict", "options": _TIMEOUTS},
    "save": {"type": "bool", "default": False},
    "save_file": {"type": "path"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}


def main() -> None:
    """Run the module."""
    run(changed, _OPTIONS, needs_root="changing virtual servers")


if __name__ == "__main__":
    main()
