#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: host_summary
short_description: Print one sentence about a host
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Prints one line, the host and a sentence, even where C(display_ok_hosts) hides what tasks without changes return.
    The playbooks of this collection end with it.
  - Runs on the controller, as an action plugin.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  sentence:
    description: What to print after the name of the host. An empty one is not printed.
    type: str
    default: ""
  lines:
    description: Lines to print below it without the name of the host, such as a diff.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Nothing is changed in any mode.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Say what serves the host
  kubenode.proxy.host_summary:
    sentence: served by the agent in nftables mode, kube-proxy kept off, verified
"""

RETURN = r"""
sentence:
  description: The sentence, on one line.
  type: str
  returned: success
  sample: served by the agent in nftables mode, kube-proxy kept off, verified
"""
