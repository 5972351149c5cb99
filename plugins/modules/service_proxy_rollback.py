#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_proxy_rollback
short_description: Take a node back to a state that was saved before a change
version_added: 0.1.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - M(kubenode.proxy.service_proxy) saves what is programmed on the node before it changes something, whoever had
    programmed it, in whatever mode. This module programs it again.
  - Only the difference is applied. Chains, sets, virtual servers and addresses that are not a service proxy's own are
    never touched, and connections that are open stay open.
  - The state before a rollback is saved as well, so that a rollback can be undone by its number.
  - Kernel modules stay loaded. Connection tracking entries, counters and the memory of session affinity are not saved.
extends_documentation_fragment:
  - kubenode.proxy.attributes
  - kubenode.proxy.history_options
  - kubenode.proxy.convergence_options
options:
  to:
    description:
      - Number of the saved state to go back to.
      - By default the newest that was saved before a convergence. A second rollback then changes nothing.
    type: int
  stop_agent:
    description:
      - Stop the agent, C(kubenode-proxy.service), and the timer of the role P(kubenode.proxy.schedule#role), if they
        run. They would undo the rollback. Whether they start at the next boot stays as it is.
    type: bool
    default: true
  keep_states:
    description:
      - How many saved states are kept. The oldest are removed.
    type: int
    default: 5
notes:
  - Needs root.
  - A change that waits to be confirmed is withdrawn by a rollback; see M(kubenode.proxy.service_proxy_confirm).
requirements:
  - Python 3.9 or later on the node
seealso:
  - module: kubenode.proxy.service_proxy
  - module: kubenode.proxy.service_proxy_confirm
"""

EXAMPLES = r"""
- name: Go back to what was programmed before the last change
  kubenode.proxy.service_proxy_rollback:

- name: Show what going back would change
  kubenode.proxy.service_proxy_rollback:
  check_mode: true
  diff: true

- name: Go back to a state of the list that the last run has returned
  kubenode.proxy.service_proxy_rollback:
    to: 12
"""

RETURN = r"""
state:
  description: Number of the saved state.
  type: int
  returned: success
  sample: 12
saved_state:
  description: Number under which the state before the rollback was saved. V(null) if nothing was changed.
  type: int
  returned: success
  sample: 14
stopped:
  description: The units that were stopped, or would be in check mode.
  type: list
  elements: str
  returned: success
  sample: [kubenode-proxy.service]
changes:
  description: The tables that differed, with counts.
  type: list
  elements: dict
  returned: success
  sample:
    - {table: IPv4 chains (nft), added: 40, replaced: 6, removed: 0, entries: [nat KUBE-SERVICES], truncated: true}
states:
  description: The saved states, newest first.
  type: list
  elements: dict
  returned: success
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
      description: Before what it was saved.
      type: str
      sample: before a convergence
    mode:
      description: The mode that it looks like, V(iptables), V(ipvs) or V(nftables). Empty if nothing was programmed.
      type: str
      sample: iptables
    counts:
      description: How many entries of each kind it has.
      type: dict
      sample: {chains: 512, nftables_objects: 0, virtual_servers: 0, real_servers: 0, set_elements: 0, addresses: 0}
    size_bytes:
      description: Size of its file.
      type: int
      sample: 20480
    outcome:
      description: What became of the change after it, if that had to be confirmed.
      type: str
      sample: confirmed
    problem:
      description: Why the file cannot be used. Empty if it can.
      type: str
      sample: ""
durations:
  description: Seconds spent per stage and table.
  type: dict
  returned: success
  sample: {observe: 0.041, save: 0.02, apply: 0.112}
error_kind:
  description: The kind of failure, V(history), V(preflight) or V(kernel).
  type: str
  returned: failure
  sample: history
"""

from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.restore import (
    RollbackRequest,
    rollback,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.store import History
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import convergence_spec
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.history import history_spec, states_result
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import (
    change_result,
    table_differences,
)


def rolled_back(module: AnsibleModule) -> Dict[str, Any]:
    """Go back, and return what was done."""
    parameters: Dict[str, Any] = module.params
    request = RollbackRequest(
        to=parameters["to"],
        history_directory=parameters["history_directory"],
        keep=parameters["keep_states"],
        check=bool(module.check_mode),
        describe=bool(module._diff),
        stop_units=parameters["stop_agent"],
        state_directory=parameters["state_directory"],
        lock_timeout=parameters["lock_timeout"],
    )
    report = rollback(request)
    warn(module, report.warnings, ())
    result = {
        "changed": report.changed or bool(report.stopped),
        "state": report.record.number,
        "saved_state": report.saved,
        "stopped": list(report.stopped),
        "changes": change_result(report.changes),
        "states": states_result(History(request.history_directory, request.keep)),
        "durations": {stage: round(seconds, 3) for stage, seconds in report.durations.items()},
    }
    if request.describe:
        result["diff"] = table_differences(report.changes, parameters["diff_lines"])
    return result


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "to": {"type": "int"},
            "stop_agent": {"type": "bool", "default": True},
            **convergence_spec(),
            **history_spec(),
        },
        supports_check_mode=True,
    )
    run(module, rolled_back)


if __name__ == "__main__":
    main()
