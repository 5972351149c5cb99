# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.node_programs, the first module on a node, and name a Python that cannot run modules."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action of the module."""

    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Return the result of the task."""
        result: Dict[str, Any] = super().run(tmp, task_vars)
        found = self._execute_module(task_vars=task_vars)
        if not found.get("failed") or "error_kind" in found or "invocation" in found:
            return {**result, **found}
        # Not a failure of the module. Ansible's own words differ between its versions.
        said = str(found.get("module_stderr") or found.get("msg")).strip().splitlines() or [""]
        host = (task_vars or {}).get("inventory_hostname", "")
        problem = f"{host}: the Python of this host cannot run modules: {said[-1]}"
        remedy = "install Python 3.9 or later, or set ansible_python_interpreter to it"
        return {**result, "failed": True, "msg": f"{problem}; {remedy}", "error_kind": "python"}
