# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet report: the states that the nodes of a cluster reported, as one document and one page.

It runs on the controller, knows neither Ansible nor the kernel, and trusts none of its input.
"""
