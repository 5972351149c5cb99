#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: ipvs_services_info
short_description: List IPVS virtual servers, their real servers and their connections
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Lists the virtual servers of the Linux Virtual Server (IPVS, LVS) with their real servers, as
    M(kubenode.proxy.ipvs_services) takes them, and the number of connections of each real server.
  - Virtual servers of protocols other than TCP, UDP and SCTP are not listed.
extends_documentation_fragment:
  - kubenode.proxy.attributes.info
  - kubenode.proxy.attributes
options:
  address:
    description: List only the virtual servers of this address.
    type: str
  port:
    description: List only the virtual servers of this port.
    type: int
  protocol:
    description: List only the virtual servers of this protocol.
    type: str
    choices: [tcp, udp, sctp]
  firewall_mark:
    description: List only the virtual servers of this firewall mark.
    type: int
seealso:
  - module: kubenode.proxy.ipvs_services
"""

EXAMPLES = r"""
- name: Drain a real server
  kubenode.proxy.ipvs_services:
    services:
      - address: 192.0.2.10
        port: 443
        exclusive: false
        real_servers:
          - address: 10.0.0.22
            port: 8443
            weight: 0

- name: Wait until its connections have ended
  kubenode.proxy.ipvs_services_info:
    address: 192.0.2.10
    port: 443
  register: ipvs
  until: >-
    ipvs.services[0].real_servers | selectattr('address', 'eq', '10.0.0.22') | map(attribute='connections') | sum == 0
  retries: 60
  delay: 5
"""

RETURN = r"""
services:
  description: The virtual servers, by family, protocol, address and port.
  returned: success
  type: list
  elements: dict
  contains:
    address:
      description: Address of the virtual server. Empty with a firewall mark.
      type: str
      returned: always
      sample: 192.0.2.10
    port:
      description: Port of the virtual server. V(0) with a firewall mark.
      type: int
      returned: always
      sample: 443
    protocol:
      description: Protocol of the virtual server. Empty with a firewall mark.
      type: str
      returned: always
      sample: tcp
    firewall_mark:
      description: Mark of the packets that the virtual server takes. V(0) with an address.
      type: int
      returned: always
      sample: 0
    family:
      description: Family of the virtual server, V(ipv4) or V(ipv6).
      type: str
      returned: always
      sample: ipv4
    scheduler:
      description: Name of the scheduler.
      type: str
      returned: always
      sample: wrr
    flags:
      description: Flags of the scheduler.
      type: list
      elements: str
      returned: always
      sample: []
    persistence:
      description: Seconds for which a client keeps its real server, V(0) for none.
      type: int
      returned: always
      sample: 300
    persistence_prefix:
      description: Length in bits of the prefix by which clients are grouped.
      type: int
      returned: always
      sample: 32
    one_packet:
      description: Whether every packet is scheduled separately.
      type: bool
      returned: always
      sample: false
    real_servers:
      description: The real servers.
      type: list
      elements: dict
      returned: always
      contains:
        address:
          description: Address of the real server.
          type: str
          returned: always
          sample: 10.0.0.21
        port:
          description: Port of the real server.
          type: int
          returned: always
          sample: 8443
        weight:
          description: Weight of the real server.
          type: int
          returned: always
          sample: 3
        forwarding:
          description: V(nat), V(dr) or V(tunnel), or the kernel's name of another method.
          type: str
          returned: always
          sample: nat
        connections:
          description: Number of connections, active and inactive ones.
          type: int
          returned: always
          sample: 12
timeouts:
  description: Seconds after which the kernel forgets idle connections.
  returned: success
  type: dict
  sample: {tcp: 900, tcp_fin: 120, udp: 300}
error_kind:
  description: The kind of failure, for conditions in playbooks.
  returned: failure
  type: str
  sample: kernel
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.ipvs_records import Selection, records
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.ipvs_services import connect
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def _found(module: AnsibleModule) -> dict[str, Any]:
    """Return the result. Raises ProxyError."""
    selection = Selection(**module.params).canonical()
    with connect() as connection:
        return {"changed": False, "services": records(connection, selection), "timeouts": connection.timeouts()}


_OPTIONS = {
    "address": {"type": "str"},
    "port": {"type": "int"},
    "protocol": {"type": "str", "choices": ["tcp", "udp", "sctp"]},
    "firewall_mark": {"type": "int"},
}


def main() -> None:
    """Run the module."""
    run(
        _found,
        _OPTIONS,
        mutually_exclusive=[("firewall_mark", name) for name in ("address", "port", "protocol")],
        needs_root="listing virtual servers",
    )


if __name__ == "__main__":
    main()
