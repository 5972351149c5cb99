#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_proxy
short_description: Make a node serve Kubernetes Services
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Programs the kernel of a node so that it serves the Services of a cluster, as kube-proxy 1.36 would, from a
    snapshot of the cluster or from an API server.
  - What is there is compared with what should be there, and only the difference is applied. Chains, sets, virtual
    servers and addresses that are not the service proxy's own are never touched.
  - An object of the cluster that is not valid is left out and reported; all others are served.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.proxy_options
  - kubenode.proxy.convergence_options
  - kubenode.proxy.history_options
  - kubenode.proxy.kubernetes_api
options:
  state:
    description:
      - V(present) serves the Services. Exactly one source is needed, O(snapshot), O(cluster_state) or an API server.
      - V(absent) removes everything that this module, or kube-proxy itself, has programmed in any mode, and needs no
        source.
      - V(rendered) returns what would be programmed, in the syntax of the usual tools, in RV(rendered). It touches
        nothing, looks at nothing on the host, and needs no rights, so it can run anywhere. It needs O(node_name), and
        a mode other than V(auto).
      - V(released) is for a node that kube-proxy has taken over in nftables mode, from this module or the agent. It
        removes what is left of these in kube-proxy's table and that nothing refers to, such as the map of all
        endpoints, and needs no source. Nothing of kube-proxy's is removed. It fails until kube-proxy has programmed the
        node.
    type: str
    choices: [present, absent, released, rendered]
    default: present
  node_addresses:
    description:
      - With O(state=rendered), the addresses that the node is taken to have; node ports are served on them.
      - By default the addresses of the Node object, and the loopback addresses.
    type: list
    elements: str
  keep_states:
    description:
      - How many saved states are kept. The oldest are removed. With V(0) the node's state is not saved.
      - It is saved before something is changed, with O(state=present) only. M(kubenode.proxy.service_proxy_rollback)
        goes back to it.
    type: int
    default: 5
  confirm_timeout:
    description:
      - Seconds within which M(kubenode.proxy.service_proxy_confirm) has to confirm a change. Otherwise the node goes
        back to the state before it by itself, even if nobody can reach it any more.
      - The node must have been booted by systemd, which gets a timer for it before the change. While a change waits,
        another convergence is refused.
      - With V(0) a change stays.
    type: float
    default: 0.0
  max_loss_percent:
    description:
      - A change that would leave more than this share of the Services that have endpoints on the node now without
        endpoints is refused, by the finding V(loss) of O(ignore_findings). With fewer than ten such Services none is.
      - What is served now is read from the kernel, whoever has programmed it. V(100) refuses no change.
    type: float
    default: 50.0
  unattended:
    description:
      - Nobody watches this run, a timer has started it. What O(max_loss_percent) forbids is refused once, and done if
        the next run is given a cluster state that says the same.
    type: bool
    default: false
notes:
  - Needs root, except for O(state=rendered).
  - A convergence of the same node that is already running is waited for, O(lock_timeout) seconds at most.
  - Removing the node's last Service does not remove the chains; O(state=absent) does.
requirements:
  - Python 3.9 or later on the node
  - iptables and iptables-restore, except in mode V(nftables)
  - the Python package PyYAML, only to read a kubeconfig that is YAML
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
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

- name: Serve by IPVS with the least-connection scheduler, by iptables where the kernel has no IPVS
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

- name: Show what node worker-1 would be programmed with, on the controller and without the node
  kubenode.proxy.service_proxy:
    state: rendered
    snapshot: snapshots/production.json
    node_name: worker-1
    node_addresses: [192.0.2.11]
    mode: iptables
  delegate_to: localhost
  register: review

- name: Remove what kube-proxy, which serves this node again, does not use
  kubenode.proxy.service_proxy:
    state: released

- name: Remove everything again
  kubenode.proxy.service_proxy:
    state: absent
"""

RETURN = r"""
mode:
  description: The dataplane in use.
  type: str
  returned: success
  sample: ipvs
mode_reason:
  description: Why it is that one.
  type: str
  returned: O(state) is not V(rendered)
  sample: the configuration says so
node_name:
  description: The name of the node by which its endpoints were found.
  type: str
  returned: O(state) is not V(rendered)
  sample: worker-1
families:
  description: The families of addresses that are served.
  type: list
  elements: str
  returned: O(state) is not V(rendered)
  sample: [IPv4, IPv6]
variant:
  description:
    - The iptables in use on the node, with its version, its variant (legacy or nft) and why that one. May be empty.
  type: str
  returned: O(state) is not V(rendered)
  sample: "iptables 1.8.9 (nft: kubelet's chain KUBE-IPTABLES-HINT is in mangle)"
counts:
  description:
    - How much is served, how many of the Services are without endpoints, and how many entries were added, replaced and
      removed, or would be in check mode.
  type: dict
  returned: O(state) is not V(rendered)
  sample: {services: 12, without_endpoints: 1, service_ports: 15, endpoints: 34, added: 112, replaced: 3, removed: 0}
changes:
  description: The tables that differed, with counts and the names of the first few entries, those first that lack most.
  type: list
  elements: dict
  returned: O(state) is not V(rendered)
  sample:
    - {table: IPv4 chains, added: 40, replaced: 2, removed: 0, entries: [nat KUBE-SERVICES], truncated: true}
refused:
  description: The first 100 objects of the cluster that were left out because they are not valid.
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
      description: The field that is wrong.
      type: str
      sample: spec.ports[0].port
    reason:
      description: What is wrong with it.
      type: str
      sample: 70000 is not between 1 and 65535
refused_count:
  description: How many objects were left out.
  type: int
  returned: success
  sample: 0
skipped:
  description:
    - The first 100 parts of objects of the cluster, addresses and endpoints, that were left out because they are not
      valid, while the rest of their object is served. The keys are those of RV(refused).
  type: list
  elements: dict
  returned: success
  sample: []
skipped_count:
  description: How many parts of objects were left out.
  type: int
  returned: success
  sample: 0
conntrack_deleted:
  description: How many connection tracking entries were deleted because they led to endpoints that are gone.
  type: int
  returned: O(state) is not V(rendered)
  sample: 0
durations:
  description: Seconds spent per stage.
  type: dict
  returned: O(state) is not V(rendered)
  sample: {observe: 0.041, apply: 0.112}
kernel:
  description:
    - What the configuration asks of the kernel in the mode in effect, in the terms of the role
      C(kubenode.proxy.kernel), which keeps it over a reboot.
  type: dict
  returned: O(state=present)
  sample:
    mode: ipvs
    schedulers: [rr]
    strict_arp: false
    route_localnet: false
    conntrack: {max_per_core: 32768, min: 131072, tcp_established_timeout: 86400, tcp_close_wait_timeout: 3600}
saved_state:
  description: Number of the state that was saved before the change. V(null) if none was.
  type: int
  returned: O(state) is not V(rendered)
  sample: 12
confirm_until:
  description: When the node goes back unless the change is confirmed, in UTC. Empty if the change stays.
  type: str
  returned: O(state) is not V(rendered)
  sample: "2026-05-04T03:02:01Z"
probes:
  description:
    - Probes for O(kubenode.proxy.service_proxy_confirm#module:probes), of the ClusterIP of the API server and of the
      cluster's DNS, as far as the cluster's state has them with endpoints.
  type: list
  elements: str
  returned: O(state) is not V(rendered)
  sample: ["tcp://10.96.0.1:443", "dns://10.96.0.10:53/kubernetes.default.svc.cluster.local"]
rendered:
  description:
    - Text by the tool that takes it as input, C(iptables-restore) and C(ip6tables-restore), or C(nft) with a family; in
      mode V(ipvs) also C(ipset), C(ipvsadm) and C(ip), each with a family.
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

from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.validate import in_mode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.render import render
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import (
    SOURCES_EXCLUDE,
    proxy_spec,
    source_spec,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.history import history_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.requests import engine_request
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import (
    kernel_settings,
    refused_result,
    report_result,
    table_differences,
)


def rendered(module: AnsibleModule) -> Dict[str, Any]:
    """Return the text of everything that would be programmed."""
    request, warnings = engine_request(module, source="required")
    texts = render(request)
    refused, skipped = request.cluster.refusals, request.cluster.skipped
    warn(module, warnings, refused, skipped)
    return {
        "changed": False,
        "mode": request.mode or request.configuration.mode,
        "rendered": texts,
        **refused_result(refused, skipped),
    }


def converged(module: AnsibleModule) -> Dict[str, Any]:
    """Make the node serve, or no longer serve, and return what was done."""
    request, warnings = engine_request(module, source="required" if module.params["state"] == "present" else "unused")
    keep = module.params["keep_states"]
    if keep:
        request = request._replace(history_directory=module.params["history_directory"], keep_states=keep)
    report = converge(request._replace(confirm_timeout=module.params["confirm_timeout"]))
    warn(module, [*warnings, *report.warnings], report.refused, report.skipped)
    result = {
        "changed": report.changed,
        "conntrack_deleted": report.conntrack_deleted,
        "saved_state": report.saved_state,
        "confirm_until": report.confirm_until,
        "probes": list(report.probes),
        **report_result(report),
    }
    if request.state == "present":
        result["kernel"] = kernel_settings(in_mode(request.configuration, report.mode))
    if request.describe:
        result["diff"] = table_differences(report.changes, module.params["diff_lines"])
    return result


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent", "released", "rendered"], "default": "present"},
            "node_addresses": {"type": "list", "elements": "str"},
            "confirm_timeout": {"type": "float", "default": 0.0},
            "max_loss_percent": {"type": "float", "default": 50.0},
            "unattended": {"type": "bool", "default": False},
            **source_spec(),
            **proxy_spec(),
            **history_spec(),
        },
        mutually_exclusive=SOURCES_EXCLUDE,
        supports_check_mode=True,
    )
    run(module, rendered if module.params["state"] == "rendered" else converged)


if __name__ == "__main__":
    main()
