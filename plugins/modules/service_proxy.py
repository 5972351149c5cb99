#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: service_proxy
short_description: Make a node serve Kubernetes Services
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Programs the kernel of a node so that it serves the Services of a cluster, as kube-proxy 1.36 would, from a
    snapshot of the cluster or from an API server.
  - The module compares the current state of the kernel with the desired state and applies only the difference. It never
    touches chains, sets, virtual servers and addresses that do not belong to the service proxy.
  - An invalid object of the cluster is skipped and reported; all others are served.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.proxy_options
  - kubenode.proxy.convergence_options
  - kubenode.proxy.history_options
  - kubenode.proxy.kubernetes_api
options:
  state:
    description:
      - V(present) serves the Services. It requires exactly one source, O(snapshot), O(cluster_state) or an API server.
      - V(absent) removes everything that this module or kube-proxy has programmed in any mode. It requires no source.
        While kube-proxy runs on the node it fails with the finding V(kube-proxy) of O(ignore_findings).
        V(absent) fails with the finding V(kubelet) while kubelet uses an address of the API servers.
      - V(rendered) returns what would be programmed, in the syntax of the usual tools, in RV(rendered). It neither
        reads nor changes the host's state and needs no privileges, so it can run anywhere. It requires O(node_name) and
        a mode other than V(auto). What V(present) would refuse about the cluster state is a warning.
      - V(handed_over) is for a node on which kube-proxy has replaced this module or the agent. It removes their
        unreferenced objects, such as the map of all endpoints, from kube-proxy's table of nftables mode, in ipvs mode
        the table that filters beside IPVS, and the table of network policies unless O(node_configuration) enables
        them; nothing that belongs to kube-proxy. It requires no source. It fails until kube-proxy has programmed the
        node.
    type: str
    choices: [present, absent, handed_over, rendered]
    default: present
  node_addresses:
    description:
      - With O(state=rendered), the addresses to assume for the node; node ports are served on them.
      - Defaults to the addresses of the Node object and the loopback addresses.
    type: list
    elements: str
  keep_states:
    description:
      - Number of saved states to keep; the oldest are removed. With V(0) the node's state is not saved.
      - The state is saved before a change, with O(state=present) only. M(kubenode.proxy.service_proxy_rollback)
        restores it.
    type: int
    default: 5
  boot:
    description:
      - Whether to keep what is programmed for the next boot, in C(/var/lib/kubenode-proxy-boot), with a program that
        restores it. The role service_proxy installs the unit that starts that program.
      - With V(false), and with O(state=absent) or O(state=handed_over), what an earlier run has kept is removed. By
        default it is replaced where an earlier run has kept it.
      - While a change is pending because of O(confirm_timeout), the state before it remains the one of the next boot.
    type: bool
  confirm_timeout:
    description:
      - Seconds within which M(kubenode.proxy.service_proxy_confirm) must confirm a change. Otherwise the node
        automatically rolls back to the state before the change, even if it can no longer be reached.
      - Requires systemd, which runs the timer for the rollback. While a change is pending, another convergence is
        refused.
      - With V(0) a change needs no confirmation. O(state=absent) and O(state=handed_over) require V(0), because no
        state is saved to which the node could roll back.
    type: float
    default: 0.0
  max_unserved_percent:
    description:
      - Maximum percentage of the Services currently served with endpoints on the node that a change may leave without
        endpoints. A change above it is refused with the finding V(loss) of O(ignore_findings). The check does not apply
        to fewer than ten such Services.
      - The Services currently served are read from the kernel, whichever program programmed them. V(100) disables the
        check.
    type: float
    default: 50.0
  unattended:
    description:
      - Whether this run is started by a timer and not watched by a person. A change that O(max_unserved_percent)
        forbids is refused once, and applied if the next run is given the same cluster state.
    type: bool
    default: false
  always_observe:
    description:
      - Whether to observe the kernel in full even if input, engine and kernel are as they were after the last complete
        run in mode V(nftables). By default such a run returns the result of that one; RV(observed) shows it.
      - A run in check mode or with diff mode, with O(confirm_timeout), or that reads an API server observes in any
        case, as do the other modes, and M(kubenode.proxy.service_proxy_info).
    type: bool
    default: false
notes:
  - Needs root, except for O(state=rendered).
  - If another convergence of the same node is running, the module waits for it, at most O(lock_timeout) seconds.
  - Removing the node's last Service does not remove the chains; O(state=absent) does.
requirements:
  - Python 3.9 or later on the node
  - iptables and iptables-restore, only in mode V(iptables), and in mode V(ipvs) with the filter backend V(iptables)
  - the Python package PyYAML, only to read a kubeconfig in YAML
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
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
seealso:
  - module: kubenode.proxy.service_proxy_confirm
  - module: kubenode.proxy.service_proxy_rollback
  - module: kubenode.proxy.cluster_snapshot
  - module: kubenode.proxy.service_proxy_info
"""

EXAMPLES = r"""
- name: Serve the Services of the snapshot in the best mode of this kernel
  kubenode.proxy.service_proxy:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    mode: auto

- name: Use IPVS with the least-connection scheduler, or iptables if the kernel has no IPVS
  kubenode.proxy.service_proxy:
    snapshot: /var/lib/kubenode-proxy/snapshot.json.gz
    node_name: worker-1
    mode: ipvs
    fallback: iptables
    configuration:
      ipvs:
        scheduler: lc
      detectLocalMode: ClusterCIDR
      clusterCIDR: 10.244.0.0/16

- name: Show what would be programmed on worker-1, without contacting the node
  kubenode.proxy.service_proxy:
    state: rendered
    snapshot: snapshots/production.json
    node_name: worker-1
    node_addresses: [192.0.2.11]
    mode: iptables
  delegate_to: localhost
  register: review

- name: Remove objects that kube-proxy, which serves this node again, does not use
  kubenode.proxy.service_proxy:
    state: handed_over

- name: Remove everything
  kubenode.proxy.service_proxy:
    state: absent
"""

RETURN = r"""
mode:
  description: The proxy mode in use.
  type: str
  returned: success
  sample: ipvs
mode_reason:
  description: Why this mode was selected.
  type: str
  returned: O(state) is not V(rendered)
  sample: set in the configuration
behaviour:
  description: Whether known defects of kube-proxy are matched (V(kube-proxy)) or corrected (V(corrected)).
  type: str
  returned: O(state) is not V(rendered)
  sample: kube-proxy
ipvs_filter_backend:
  description: What filters and masquerades beside IPVS in ipvs mode, V(iptables) or V(nftables); empty in other modes.
  type: str
  returned: O(state) is not V(rendered)
  sample: nftables
node_name:
  description: The Node name that identified the node's endpoints, zone and addresses.
  type: str
  returned: O(state) is not V(rendered)
  sample: worker-1
families:
  description: The address families that are served.
  type: list
  elements: str
  returned: O(state) is not V(rendered)
  sample: [IPv4, IPv6]
variant:
  description:
    - The iptables in use on the node, with its version, its variant (legacy or nft) and why this variant was selected.
      May be empty.
  type: str
  returned: O(state) is not V(rendered)
  sample: "iptables 1.8.9 (nft: kubelet's chain KUBE-IPTABLES-HINT is in mangle)"
counts:
  description:
    - Number of Services, Services without endpoints, Service ports and endpoints that are served, and of entries that
      were added, replaced and removed, or would be in check mode.
  type: dict
  returned: O(state) is not V(rendered)
  sample: {services: 12, without_endpoints: 1, service_ports: 15, endpoints: 34, added: 112, replaced: 3, removed: 0}
changes:
  description:
    - The tables that differed, with counts and the names of the first few entries, those with the most missing first.
  type: list
  elements: dict
  returned: O(state) is not V(rendered)
  sample:
    - {table: IPv4 chains, added: 40, replaced: 2, removed: 0, entries: [nat KUBE-SERVICES], truncated: true}
refused:
  description: The first 100 invalid objects of the cluster. They were skipped.
  type: list
  elements: dict
  returned: success
  contains:
    kind:
      description: Kind of the object.
      type: str
      sample: Service
    namespace:
      description: Its namespace.
      type: str
      sample: shop
    name:
      description: Its name.
      type: str
      sample: cart
    field:
      description: The invalid field.
      type: str
      sample: spec.ports[0].port
    reason:
      description: Why it is invalid.
      type: str
      sample: 70000 is not between 1 and 65535
    source:
      description: The file of a static object. Empty for an object of the cluster.
      type: str
      sample: ""
refused_count:
  description: Number of invalid objects that were skipped.
  type: int
  returned: success
  sample: 0
refused_parts:
  description:
    - The first 100 invalid parts of objects, such as addresses and endpoints. They were skipped, while the rest of the
      object is served. The keys are those of RV(refused).
  type: list
  elements: dict
  returned: success
  sample: []
refused_parts_count:
  description: Number of invalid parts of objects that were skipped.
  type: int
  returned: success
  sample: 0
conntrack_deleted:
  description: Number of connection tracking entries that were deleted because their endpoints no longer exist.
  type: int
  returned: O(state) is not V(rendered)
  sample: 0
observed:
  description:
    - Whether the kernel was observed in full. V(false) if input, engine and kernel are as they were after the last
      complete run, whose result this is.
  type: bool
  returned: O(state) is not V(rendered)
  sample: true
durations:
  description: Seconds spent per stage.
  type: dict
  returned: O(state) is not V(rendered)
  sample: {observe: 0.041, apply: 0.112}
kernel:
  description:
    - The kernel settings that the configuration requires in the mode in effect, as variables of the role
      C(kubenode.proxy.kernel), which makes them persistent.
  type: dict
  returned: O(state=present)
  sample:
    mode: ipvs
    schedulers: [rr]
    ipvs_filter_backend: nftables
    strict_arp: false
    route_localnet: false
    conntrack: {max_per_core: 32768, min: 131072, tcp_established_timeout: 86400, tcp_close_wait_timeout: 3600}
saved_state:
  description: Number of the state that was saved before the change. V(null) if none was saved.
  type: int
  returned: O(state) is not V(rendered)
  sample: 12
confirm_until:
  description: When the node rolls back unless the change is confirmed, in UTC. Empty if it needs no confirmation.
  type: str
  returned: O(state) is not V(rendered)
  sample: "2026-05-04T03:02:01Z"
probes:
  description:
    - Probes of the ClusterIPs of the API server and of the cluster's DNS, for
      O(kubenode.proxy.service_proxy_confirm#module:probes). A Service that the cluster state has no endpoints for has
      no probe.
  type: list
  elements: str
  returned: O(state) is not V(rendered)
  sample: ["tcp://10.96.0.1:443", "dns://10.96.0.10:53/kubernetes.default.svc.cluster.local"]
rendered:
  description:
    - Text for each tool that accepts it as input, C(iptables-restore) and C(ip6tables-restore), or C(nft) with a
      family; in mode V(ipvs) also C(ipset), C(ipvsadm) and C(ip), each with a family. With network policies also
      C(nft inet).
  type: dict
  returned: O(state=rendered)
  sample: {ipvsadm IPv4: "-A -t 10.96.0.10:53 -s rr\n..."}
error_kind:
  description:
    - The kind of failure, for conditions in playbooks, one of V(snapshot), V(api), V(configuration), V(preflight),
      V(history) or V(kernel).
  type: str
  returned: failure
  sample: preflight
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import HISTORY_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.defaults import (
    DEFAULT_KEEP,
    DEFAULT_UNSERVED_PERCENT,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import arguments
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.earlier import earlier_result
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def perform(module: AnsibleModule) -> dict[str, Any]:
    """Return the result of the last complete run if this one would have the same; otherwise run."""
    result = earlier_result(module)
    if result is not None:
        return result
    # Imported late: a run that ends early needs none of it.
    from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.complete import converged, rendered

    return rendered(module) if module.params["state"] == "rendered" else converged(module)


_OPTIONS = {
    "state": {"type": "str", "choices": ["present", "absent", "handed_over", "rendered"], "default": "present"},
    "node_addresses": {"type": "list", "elements": "str"},
    "confirm_timeout": {"type": "float", "default": 0.0},
    "max_unserved_percent": {"type": "float", "default": DEFAULT_UNSERVED_PERCENT},
    "unattended": {"type": "bool", "default": False},
    "always_observe": {"type": "bool", "default": False},
    **arguments.source_spec(),
    **arguments.proxy_spec(),
    "history_directory": {"type": "path", "default": HISTORY_DIRECTORY},
    "keep_states": {"type": "int", "default": DEFAULT_KEEP},
    "boot": {"type": "bool"},
}


def main() -> None:
    """Run the module."""
    run(perform, _OPTIONS, mutually_exclusive=arguments.SOURCES_EXCLUDE)


if __name__ == "__main__":
    main()
