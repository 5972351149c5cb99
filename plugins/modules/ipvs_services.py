#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ipvs_services
short_description: Manage IPVS virtual servers and their real servers
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Ensures that the listed virtual servers of the Linux Virtual Server (IPVS, LVS) and their real servers exist with
    the given settings. The changes are made over netlink, many per message.
  - Virtual servers that are not listed are not changed, unless their address is named in O(purge).
  - Settings are changed in place. Open connections of unchanged servers are not disturbed.
notes:
  - The kernel needs the module C(ip_vs) and those of the schedulers; M(kubenode.proxy.kernel_modules) loads them.
  - The settings do not survive a reboot.
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
        description: Address of the virtual server, IPv4 or IPv6.
        type: str
        required: true
      port:
        description: Port of the virtual server.
        type: int
        required: true
      protocol:
        description: Protocol of the virtual server.
        type: str
        choices: [tcp, udp, sctp]
        default: tcp
      scheduler:
        description: Name of the scheduler, such as V(rr), V(wrr), V(lc), V(wlc), V(sh), V(mh), V(sed) or V(nq).
        type: str
        default: wlc
      flags:
        description: Flags of the scheduler.
        type: list
        elements: str
        choices: [sh-fallback, sh-port, mh-fallback, mh-port, flag-1, flag-2, flag-3]
        default: []
      persistence:
        description: Seconds for which a client keeps its real server. V(0) disables persistence.
        type: int
        default: 0
      persistence_prefix:
        description:
          - With C(persistence), length in bits of the prefix by which clients are grouped. If not given, clients are
            not grouped.
        type: int
      one_packet:
        description: For protocol V(udp), whether to schedule every packet separately.
        type: bool
        default: false
      real_servers:
        description:
          - The real servers. All other real servers of the virtual server are removed. If not given, they are not
            changed.
        type: list
        elements: dict
        suboptions:
          address:
            description: Address of the real server.
            type: str
            required: true
          port:
            description: Port of the real server. Defaults to that of the virtual server; only V(nat) allows another.
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
  purge:
    description:
      - Addresses on which virtual servers that are not listed are removed.
    type: list
    elements: str
    default: []
  state:
    description:
      - With V(absent) the listed virtual servers are removed together with their real servers.
    type: str
    choices: [present, absent]
    default: present
seealso:
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
from typing import Any, Dict, List, Mapping

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.ipvs_services import (
    ListedReal,
    ListedServer,
    connect,
    listed_tables,
    purged_addresses,
    stages,
    unavailable_schedulers,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import tables
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange, apply_plan, plan


def _server(options: Mapping[str, Any]) -> ListedServer:
    real_servers = options["real_servers"]
    if real_servers is not None:
        real_servers = tuple(
            ListedReal(real["address"], real["port"], real["weight"], real["forwarding"]) for real in real_servers
        )
    return ListedServer(
        options["address"],
        options["port"],
        options["protocol"],
        options["scheduler"],
        options["persistence"],
        options["persistence_prefix"],
        options["one_packet"],
        tuple(options["flags"]),
        real_servers,
    )


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "services": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "required": True},
                    "protocol": {"type": "str", "choices": ["tcp", "udp", "sctp"], "default": "tcp"},
                    "scheduler": {"type": "str", "default": "wlc"},
                    "flags": {
                        "type": "list",
                        "elements": "str",
                        "choices": ["sh-fallback", "sh-port", "mh-fallback", "mh-port", "flag-1", "flag-2", "flag-3"],
                        "default": [],
                    },
                    "persistence": {"type": "int", "default": 0},
                    "persistence_prefix": {"type": "int"},
                    "one_packet": {"type": "bool", "default": False},
                    "real_servers": {
                        "type": "list",
                        "elements": "dict",
                        "options": {
                            "address": {"type": "str", "required": True},
                            "port": {"type": "int"},
                            "weight": {"type": "int", "default": 1},
                            "forwarding": {"type": "str", "choices": ["nat", "dr", "tunnel"], "default": "nat"},
                        },
                    },
                },
            },
            "purge": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    if not parameters["services"] and not parameters["purge"]:
        module.fail_json(msg="services and purge are both empty: nothing to do", error_kind="configuration")
    refused = tables.root_needed(os.geteuid(), "changing virtual servers")
    if refused:
        module.fail_json(**refused)
    planned: List[PlannedChange] = []
    try:
        wanted = listed_tables(_server(options) for options in parameters["services"])
        purge = purged_addresses(parameters["purge"])
        present = parameters["state"] == "present"
        problem = unavailable_schedulers(wanted) if present else ""
        if problem:
            raise KernelError(problem)
        with connect() as connection:
            planned = plan(stages(connection, wanted, purge, present))
            if not module.check_mode:
                apply_plan(planned)
    except ProxyError as error:
        module.fail_json(**tables.failure(error))
    result: Dict[str, Any] = {
        "changed": any(item.change for item in planned),
        "virtual_servers": len(wanted.servers),
        "real_servers": len(wanted.real_servers),
        "changes": tables.change_records(planned),
    }
    if module._diff:
        result["diff"] = tables.planned_differences(planned)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
