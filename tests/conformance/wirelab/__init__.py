# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wire-level conformance lab for Kubernetes service proxies.

The lab builds a small cluster out of network namespaces, gives a service proxy a cluster state, sends
TCP, UDP and SCTP traffic through the node under test and compares who answered, which source address
that endpoint saw, and how traffic was refused, with recordings of kube-proxy 1.36.2.
"""
