# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the controller uses on behalf of a host, unless the host may have chosen it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: controller
short_description: A value for a task that the controller runs on behalf of a host
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - For tasks that are delegated to the controller, or read a file there. Returns the value that it is given.
  - Any module that runs on a host may return facts, and with C(inject_facts_as_vars), the default, Ansible makes
    variables of them that win over those of the inventory. So this fails if the host has a fact with the name of a
    variable of this collection; the host could otherwise choose files of the controller and accounts of the cluster.
options:
  _terms:
    description: The value.
    required: true
  absolute:
    description:
      - Return an absolute path for each value that is a relative one.
      - It is relative to the directory in which Ansible was started; tasks run in directories that Ansible chooses.
        C(PWD) in the environment may name another one, or not be set, where no shell has started Ansible.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read the cluster's state
  kubenode.proxy.cluster_snapshot:
    kubeconfig: "{{ service_proxy_kubeconfig }}"
    snapshot_file: /tmp/snapshot.json.gz
  delegate_to: "{{ lookup('kubenode.proxy.controller', 'localhost') }}"
"""

RETURN = r"""
_raw:
  description: The value.
  type: list
  elements: raw
"""

from typing import Any, Optional

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.variable_names import (
    absolute_path,
    answered_variables,
)


class LookupModule(LookupBase):
    """The lookup."""

    def run(self, terms: list[Any], variables: Optional[dict[str, Any]] = None, **kwargs: Any) -> list[Any]:
        """Return the value. Raises AnsibleLookupError."""
        self.set_options(var_options=variables, direct=kwargs)
        answered = answered_variables(variables or {})
        if answered:
            raise AnsibleLookupError(
                f"{', '.join(answered)}: a fact of the host has the name of a variable of this collection, "
                "so the controller does nothing with the host's variables; set inject_facts_as_vars = false in "
                "ansible.cfg, or clear the facts of the host if it is trusted"
            )
        if self.get_option("absolute"):
            return [absolute_path(str(term)) if term else term for term in terms]
        return list(terms)
