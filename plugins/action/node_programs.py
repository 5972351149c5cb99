# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.node_programs, the first module on a node, and name a Python that cannot run modules."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action of the module."""

    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Return the result of the task."""
        result: Dict[str, Any] = super().run(tmp, task_vars)
        try:
            found = self._execute_module(task_vars=task_vars)
        except AnsibleConnectionFailure:
            raise
        except AnsibleError as error:
            found = {"failed": True, "msg": str(error)}
        if not found.get("failed") or "error_kind" in found or "invocation" in found:
            return {**result, **found}
        # Not a failure of the module. Ansible's own words differ between its versions.
        said = str(found.get("module_stderr") or found.get("msg")).strip().splitlines() or [""]
        host = (task_vars or {}).get("inventory_hostname", "")
        refused = self._why_not_become()
        if refused:
            become = self._connection.become
            problem = f"{host}: become: {become.name} does not run programs as {become.get_option('become_user')}"
            remedy = "check ansible_become_password (--ask-become-pass), ansible_become_method and ansible_become_user"
            return {**result, "failed": True, "msg": f"{problem}: {refused}; {remedy}", "error_kind": "become"}
        problem = f"{host}: the Python of this host cannot run modules: {said[-1]}"
        remedy = "install Python 3.9 or later, or set ansible_python_interpreter to it"
        return {**result, "failed": True, "msg": f"{problem}; {remedy}", "error_kind": "python"}

    def _why_not_become(self) -> str:
        """Return why the host refuses to become another user, with which Ansible runs modules; empty if it does not."""
        if self._connection.become is None:
            return ""
        try:
            done = self._low_level_execute_command("true", sudoable=True)
        except AnsibleConnectionFailure:
            raise
        except AnsibleError as error:
            said, status = str(error), ""
        else:
            said, status = str(done["stderr"] or done["stdout"]), f"it ends with status {done['rc']}"
            if not done["rc"]:
                return ""
        # Without the headings of parts, and prompts.
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith((">>>", "["))]
        return lines[-1].rstrip(".") if lines else status
