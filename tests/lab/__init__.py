# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A laboratory of real kernels: network namespaces for iptables, user-mode Linux for IPVS.

Nothing in it touches the host's own rules, modules, sysctls or files: every node has a separate network namespace or
kernel, and writes to an overlay that disappears with it.
"""
