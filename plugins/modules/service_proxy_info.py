#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: service_proxy_info
short_description: Report the programmed state of a node and its drift from the cluster state
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Counts what the service proxy has programmed into the kernel of a node, table by table.
  - Given a snapshot of the cluster or an API server, it also reports how the node differs from it.
  - On request it also probes Services from the node.
  - Changes nothing. It never fails because of drift; check RV(drift) or use the playbook kubenode.proxy.verify.
options:
  history_directory:
    description:
      - Directory on the node in which states are saved before a change, such as V(/var/lib/kubenode-proxy-history). If
        given, RV(states) lists them.
    type: path
  traffic:
    description:
      - Whether to connect from the node to the cluster IPs of O(traffic_services), through what the kernel holds now.
        Needs a source of the cluster state.
      - A TCP port must accept a connection; one that is named C(https), and that of C(default/kubernetes), must answer
        a TLS handshake; UDP port 53 must answer a DNS query. Other ports are not probed. Each probe is repeated until
        it succeeds or O(traffic_timeout) is over.
    type: bool
    default: false
  traffic_services:
    description: The Services, as C(NAMESPACE/NAME). Without any C(default/kubernetes) and the cluster's DNS.
    type: list
    elements: str
    default: []
  traffic_timeout:
    description: Seconds within which all probes must succeed.
    type: float
    default: 5.0
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.proxy_options
  - kubenode.proxy.convergence_options
  - kubenode.proxy.kubernetes_api
attributes:
  action_group:
    description:
      - Use C(group/kubenode.proxy.kubernetes_api), C(group/kubenode.proxy.convergence), C(group/kubenode.proxy.history)
        or C(group/kubenode.proxy.state) in C(module_defaults) to set options that all modules of the group have.
    support: full
    membership:
      - kubenode.proxy.kubernetes_api
      - kubenode.proxy.convergence
      - kubenode.proxy.history
      - kubenode.proxy.state
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description:
      - Returns the differences from the cluster state, one entry per table, in the syntax of the table's usual tool.
    support: full
notes:
  - Needs root, because only root can read the kernel's tables.
requirements:
  - Python 3.9 or later on the node
  - the Python package PyYAML, only to read a kubeconfig in YAML
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
seealso:
  - module: kubenode.proxy.service_proxy
"""

EXAMPLES = r"""
- name: Count the programmed entries
  kubenode.proxy.service_proxy_info:
  register: node

- name: Compare the node with a snapshot
  kubenode.proxy.service_proxy_info:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    mode: ipvs
  register: node

- name: Ask which Services the node reaches
  kubenode.proxy.service_proxy_info:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    traffic: true
    traffic_services: [default/kubernetes, shop/web]
  register: node

- name: Stop if it has drifted
  ansible.builtin.assert:
    that: not node.drift
"""

RETURN = r"""
drift:
  description:
    - Whether the node differs from the cluster state.
    - If an agent runs on the node and follows the API server with the same settings, changes of the cluster that it
      knows are not drift, nor are endpoints that fail its health checks. See RV(newer) and RV(excluded_endpoints).
  type: bool
  returned: a source of the cluster state is given
  sample: false
changes:
  description:
    - The tables that differ, with counts of missing (C(added)), different (C(replaced)) and unexpected (C(removed))
      entries, and the names of the first few entries, those with the most missing first.
  type: list
  elements: dict
  returned: a source of the cluster state is given
  sample:
    - {table: IPv4 chains, added: 0, replaced: 1, removed: 0, entries: [nat KUBE-SERVICES], truncated: false}
summary:
  description: RV(changes) in one line. Empty without drift.
  type: str
  returned: a source of the cluster state is given
  sample: "IPv4 chains: 1 different; IPv4 real servers: 2 missing"
difference:
  description:
    - A unified diff of each table that differs, in the syntax of its usual tool, of at most O(diff_lines) lines. C(-)
      marks lines that only the node has, C(+) lines that it lacks.
    - The default callback plugin prints C(diff) only for tasks that report a change, which this module never does.
  type: list
  elements: str
  returned: a source of the cluster state is given, in diff mode
  sample:
    - "--- before: IPv4 chains"
    - "+++ after: IPv4 chains"
    - "@@ -0,0 +1 @@"
    - "+-t nat -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
newer:
  description:
    - How the node differs from the given cluster state because its agent serves another one, in one line. Empty if it
      serves the given one.
    - The agent knows changes of the cluster that were made after the state was read. It has then compared the kernel
      with what it is meant to serve, and RV(changes) are the differences that it has found.
  type: str
  returned: a source of the cluster state is given
  sample: "IPv4 chains: 1 different (nat KUBE-SVC-BSTKPPOKEZWFR56I)"
excluded_endpoints:
  description:
    - Number of endpoints that the node's agent does not serve because they fail its health checks. They are omitted
      from the comparison. 0 without an agent.
  type: int
  returned: a source of the cluster state is given
  sample: 1
programmed:
  description: Current number of entries per table that belong to the service proxy. Empty tables are omitted.
  type: dict
  returned: success
  sample: {IPv4 chains: 61, IPv4 virtual servers: 15}
mode:
  description: The proxy mode that the node is compared with.
  type: str
  returned: a source of the cluster state is given
  sample: ipvs
mode_reason:
  description: Why this mode was selected.
  type: str
  returned: a source of the cluster state is given
  sample: set in the configuration
behaviour:
  description: Whether known defects of kube-proxy are matched (V(kube-proxy)) or corrected (V(corrected)).
  type: str
  returned: a source of the cluster state is given
  sample: kube-proxy
ipvs_filter_backend:
  description: What filters and masquerades beside IPVS in ipvs mode, V(iptables) or V(nftables); empty in other modes.
  type: str
  returned: a source of the cluster state is given
  sample: nftables
node_name:
  description: The Node name that identified the node's endpoints, zone and addresses.
  type: str
  returned: success
  sample: worker-1
families:
  description: The address families that were inspected.
  type: list
  elements: str
  returned: success
  sample: [IPv4, IPv6]
booted_from:
  description:
    - The time of the state that the node has restored when it booted, in UTC. Empty if it has converged since, or has
      restored none.
  type: str
  returned: always
  sample: ""
schedule_failure:
  description:
    - That the last run of the role schedule has failed on this node, and since when none has succeeded. Empty if it
      has succeeded, or if no runs are scheduled.
  type: str
  returned: always
  sample: ""
variant:
  description:
    - The iptables in use on the node, with its version, its variant (legacy or nft) and why this variant was selected.
      May be empty.
  type: str
  returned: success
  sample: "iptables 1.8.9 (nft: kubelet's chain KUBE-IPTABLES-HINT is in mangle)"
counts:
  description:
    - Number of Services, Services without endpoints, Service ports and endpoints that should be served, and of entries
      that a convergence would add, replace and remove.
  type: dict
  returned: a source of the cluster state is given
  sample: {services: 12, without_endpoints: 1, service_ports: 15, endpoints: 34, added: 0, replaced: 1, removed: 0}
refused:
  description:
    - The first 100 invalid objects of the cluster, as returned by M(kubenode.proxy.service_proxy). They are skipped.
  type: list
  elements: dict
  returned: a source of the cluster state is given
  sample: []
refused_count:
  description: Number of invalid objects that are skipped.
  type: int
  returned: a source of the cluster state is given
  sample: 0
refused_parts:
  description:
    - The first 100 invalid parts of objects of the cluster, as returned by M(kubenode.proxy.service_proxy). They are
      skipped.
  type: list
  elements: dict
  returned: a source of the cluster state is given
  sample: []
refused_parts_count:
  description: Number of invalid parts of objects that are skipped.
  type: int
  returned: a source of the cluster state is given
  sample: 0
network_policy:
  description:
    - The first 100 pods of this node that no NetworkPolicy selects (C(unselected_pods)), the first 100 NetworkPolicies
      that select no pod of the cluster (C(unused_policies)), and how many there are of each.
  type: dict
  returned: a source of the cluster state is given, and network policies are enforced
  sample:
    unselected_pods: [shop/open]
    unselected_pods_count: 1
    unused_policies: []
    unused_policies_count: 0
agent_version:
  description:
    - Version of the engine that the role P(kubenode.proxy.agent#role) or P(kubenode.proxy.schedule#role) has installed.
      Empty if there is none.
      It consists of the version of the collection and the first 12 digits of the SHA-256 of the engine's source.
    - M(kubenode.proxy.agent_archive) returns the version of the collection's engine for comparison.
  type: str
  returned: always
  sample: 1.0.0+4be0c6d2c1b7
agent:
  description:
    - The status of the node's agent. Empty if the role P(kubenode.proxy.agent#role) has not installed one.
    - C(running) is whether the agent answered; C(error) is why it did not, or its last error.
    - C(last_sync_age) is in seconds, V(null) before the first sync. C(version) is the version of the running engine; it
      differs from RV(agent_version) if the agent was not restarted after an update. C(api_server) is the state of each
      watch, C(api_server_lost_seconds) for how long it has been interrupted, 0 if it is open.
    - C(obstacle) is why the agent does not follow the cluster; empty if it does, or has lost a watch for less than 30
      seconds.
    - C(drained_until) is when the drain of the node ends, empty if it is not drained.
  type: dict
  returned: always
  sample:
    running: true
    healthy: true
    ready: true
    error: ""
    mode: ipvs
    version: 1.0.0+4be0c6d2c1b7
    last_sync_age: 12.5
    syncs: 1411
    drift_repaired: 0
    started_from_cache: false
    api_server: {services: watching, endpointslices: watching, nodes: watching}
    api_server_lost_seconds: {services: 0.0, endpointslices: 0.0, nodes: 0.0}
    obstacle: ""
    drained_until: ""
kernel:
  description: Release of the running kernel, as C(uname -r) prints it.
  type: str
  returned: always
  sample: 6.1.0-41-amd64
distribution:
  description: Full name of the node's operating system, from os-release.
  type: str
  returned: always
  sample: Debian GNU/Linux 12 (bookworm)
cautions:
  description: Warnings about the node or its configuration, one line each. Ansible also displays them as warnings.
  type: list
  elements: str
  returned: success
  sample: []
other_proxies:
  description:
    - Other service proxies that run on the node, such as kube-proxy, and write rules of their own, except those in
      O(ignore_findings). Empty if only network policies are enforced. It needs root, which sees the programs of all
      users.
  type: list
  elements: str
  returned: a source of the cluster state is given
  sample: []
states:
  description: The saved states, newest first.
  type: list
  elements: dict
  returned: O(history_directory) is given
  contains:
    number:
      description: Number of the state.
      type: int
      sample: 12
    created:
      description: When it was saved, in UTC.
      type: str
      sample: "2026-05-04T03:02:01Z"
    reason:
      description: Why it was saved.
      type: str
      sample: before a convergence
    mode:
      description: The detected mode, V(iptables), V(ipvs) or V(nftables). Empty if nothing was programmed.
      type: str
      sample: iptables
    counts:
      description: Number of entries of each kind.
      type: dict
      sample:
        chains: 512
        nftables_objects: 0
        ipvs_table_objects: 0
        network_policy_objects: 0
        virtual_servers: 0
        real_servers: 0
        set_elements: 0
        addresses: 0
    size_bytes:
      description: Size of its file.
      type: int
      sample: 20480
    outcome:
      description: Outcome of the change after it, if that change required confirmation.
      type: str
      sample: confirmed
    problem:
      description: Why the file cannot be used. Empty if it can.
      type: str
      sample: ""
traffic:
  description: Which of the chosen Services the node reaches, one entry per Service.
  type: list
  elements: dict
  returned: O(traffic) is true
  contains:
    service:
      description: Namespace and name of the Service.
      type: str
      sample: default/kubernetes
    reached:
      description: Whether all probes succeeded. V(null) if there was nothing to probe.
      type: bool
      sample: false
    reason:
      description: The first probe that failed, and why, or why there was nothing to probe. Empty if all succeeded.
      type: str
      sample: "tls://10.96.0.1:443: no answer within 2 seconds"
    probes:
      description: Each probe, as in RV(kubenode.proxy.service_proxy_confirm#module:probes).
      type: list
      elements: dict
      sample:
        - probe: tls://10.96.0.1:443
          answered: false
          reason: no answer within 2 seconds
          attempts: 3
          seconds: 5.009
traffic_summary:
  description: The Services in RV(traffic) that are not reached, in one line. Empty if there is none.
  type: str
  returned: O(traffic) is true
  sample: "default/kubernetes (tls://10.96.0.1:443: no answer within 2 seconds)"
durations:
  description: Seconds spent per stage.
  type: dict
  returned: success
  sample: {observe: 0.041}
error_kind:
  description: The kind of failure, one of V(snapshot), V(api), V(configuration), V(preflight) or V(kernel).
  type: str
  returned: failure
  sample: preflight
"""

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import arguments
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.inspection import about_node, inspected

_OPTIONS = {
    **arguments.source_spec(),
    **arguments.proxy_spec(),
    "history_directory": {"type": "path"},
    "traffic": {"type": "bool", "default": False},
    "traffic_services": {"type": "list", "elements": "str", "default": []},
    "traffic_timeout": {"type": "float", "default": 5.0},
}


def main() -> None:
    """Run the module."""
    run(inspected, _OPTIONS, about_node, mutually_exclusive=arguments.SOURCES_EXCLUDE)


if __name__ == "__main__":
    main()
