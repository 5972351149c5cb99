# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options that converging a node and inspecting it have in common."""

from __future__ import annotations


class ModuleDocFragment:
    """``kubenode.proxy.proxy_options``: the source of the cluster state, and the settings of the service proxy."""

    DOCUMENTATION = r"""
options:
  snapshot:
    description:
      - Path of a snapshot file on the node with Services, EndpointSlices, Nodes and ServiceCIDRs, as
        M(kubenode.proxy.cluster_snapshot) writes it or as C(kubectl get services,endpointslices,nodes -A -o json)
        prints it.
      - JSON or YAML, one list, several documents, or a list of lists, plain or compressed with gzip. YAML needs
        PyYAML on the node.
    type: path
  cluster_state:
    description:
      - The objects themselves, for a handful of them. Ansible spends more than a second on each megabyte of such an
        option, on each host; use O(snapshot) for a real cluster.
    type: list
    elements: dict
  mode:
    description:
      - The dataplane. V(auto) takes the first of nftables, ipvs and iptables that the node can run.
      - As the configuration says by default, which by its own default is iptables.
    type: str
    choices: [auto, iptables, ipvs, nftables]
  node_name:
    description:
      - Name of this node's Node object. Endpoints on this node, the node's zone and its addresses are found by it.
      - By default C(hostnameOverride) of the configuration, otherwise the host's name, in lower case.
    type: str
  config:
    description:
      - Path on the node of a KubeProxyConfiguration file, C(kubeproxy.config.k8s.io/v1alpha1). YAML needs PyYAML on
        the node.
    type: path
  configuration:
    description:
      - A KubeProxyConfiguration as data. C(apiVersion) and C(kind) may be left out. kube-proxy's defaults hold for
        what is left out.
    type: dict
  fallback:
    description:
      - What to do where mode V(ipvs) is asked for and the kernel has no IPVS. Without this option that is an error.
      - V(iptables) uses iptables mode there, with a warning.
    type: str
    choices: [iptables]
  ignore_findings:
    description:
      - Names of preflight findings to go on in spite of, for example V(firewalld). The text of a finding says its name.
      - V(incomplete-snapshot) is a cluster state without any Service, EndpointSlice or Node, V(node) a host without a
        Node, and V(loss) a change that would leave most Services without endpoints.
    type: list
    elements: str
    default: []
  outside_host:
    description:
      - Declares the host to be outside the cluster. It needs no Node object, and counts no endpoint as local.
    type: bool
    default: false
"""
