# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.role_variables on the controller, where the role and the names of all variables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

from ansible.plugins.action import ActionBase

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.variable_names import (
    OWNER,
    collection_variables,
    invalid_choices,
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
        task_vars = task_vars or {}
        _validation, options = self.validate_argument_spec(_ARGUMENTS)
        role = self._task._role
        if role is None:
            hosts = [task_vars["hostvars"].raw_get(host) for host in task_vars["ansible_play_hosts_all"]]
            invalid = sorted({line for variables in hosts for line in invalid_choices(variables, _COLLECTION)})
            if invalid:
                return {**result, "failed": True, "msg": "; ".join(invalid)}
            names = frozenset(name for variables in hosts for name in variables)
            owner, found = OWNER, unknown_in_inventory(names, collection_variables(_COLLECTION))
        else:
            prefix = f"{role.get_name().rpartition('.')[2]}_"
            known = known_variables(Path(role._role_path)).union(options["facts"])
            owner, found = "the role", unknown_variables(task_vars, prefix, known)
        misspelt = [item for item in found if item.nearest]
        result.update(changed=False, unknown=[item.name for item in found])
        if options["strict"]:
            if misspelt:
                return {**result, "failed": True, "msg": "; ".join(item.text(owner) for item in misspelt)}
            result["warnings"] = [item.text(owner) for item in found]
        else:
            result["warnings"] = [item.text(owner) for item in misspelt]
        return result
