# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.role_variables on the controller, where the role and the names of all variables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from ansible.plugins.action import ActionBase

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.variable_names import (
    OWNER,
    Unknown,
    collection_variables,
    known_variables,
    unknown_in_inventory,
    unknown_variables,
)

_COLLECTION = Path(__file__).resolve().parents[2]
_ARGUMENTS = {
    "strict": {"type": "bool", "default": False},
    "facts": {"type": "list", "elements": "str", "default": []},
}


class ActionModule(ActionBase):
    """The action of the module, which has no part that runs on a host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Return the result of the task."""
        result: Dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(_ARGUMENTS)
        role = self._task._role
        if role is None:
            owner, found = OWNER, self._in_inventory(task_vars or {})
        else:
            prefix = f"{role.get_name().rpartition('.')[2]}_"
            known = known_variables(Path(role._role_path)).union(options["facts"])
            owner, found = "the role", unknown_variables(task_vars or (), prefix, known)
        misspelt = [item for item in found if item.nearest]
        result.update(changed=False, unknown=[item.name for item in found])
        if options["strict"]:
            if misspelt:
                return {**result, "failed": True, "msg": "; ".join(item.text(owner) for item in misspelt)}
            result["warnings"] = [item.text(owner) for item in found]
        else:
            result["warnings"] = [item.text(owner) for item in misspelt]
        return result

    @staticmethod
    def _in_inventory(task_vars: Dict[str, Any]) -> List[Unknown]:
        """Return which variables of the hosts of the play the collection does not have."""
        hosts = task_vars["hostvars"]
        names = frozenset(name for host in task_vars["ansible_play_hosts_all"] for name in hosts.raw_get(host))
        return unknown_in_inventory(names, collection_variables(_COLLECTION))
