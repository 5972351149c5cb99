# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.node_programs, the first module on a node, for one run of Ansible at a time.

It names a Python that cannot run modules.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Any, Optional

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import is_running

_RECORD = "/run/kubenode-run"
# Two runs at once would leave files of one with a unit of the other. A file names the run, since no lock outlives a
# task. The lock on the directory, during a change of the file, leaves nothing.
_REMOVE = f'[ "$(cat {_RECORD} 2>/dev/null)" != "%s" ] || rm -f {_RECORD}'
_END = f'{_REMOVE % "$0"}; echo "{_RECORD}: $0"'
_TAKE = (
    f"find {_RECORD} -mmin +60 -delete 2>/dev/null; {_REMOVE % '$1'}; "
    f'[ -e {_RECORD} ] || echo "$0" >{_RECORD} || exit; echo "{_RECORD}: $(cat {_RECORD})"'
)
# A user's shell may greet and take leave, and a terminal brings errors here too.
_ANSWER = re.compile(rf"^{_RECORD}: (\d+ .*?)\s*$", re.MULTILINE)


class ActionModule(ActionBase):
    """The action of the module."""

    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return the result of the task."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        turn = self._task.args.get("turn")
        try:
            # What ends the turn of a run is no module, for speed.
            found = {} if turn == "end" else self._execute_module(task_vars=task_vars)
        except AnsibleConnectionFailure:
            raise
        except AnsibleError as error:
            found = {"failed": True, "msg": str(error)}
        if not found.get("failed") and turn in ("take", "end") and not self._task.check_mode:
            error = self._change_turn(_TAKE if turn == "take" else _END)
            found = {"failed": True, "msg": error, "error_kind": "preflight"} if error else {**found, "taken": True}
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

    def _change_turn(self, script: str) -> str:
        """Record that this run changes the host, or that it does no more; return an error if another run does.

        Every task is a child of the process that the run is. One that was killed here is known to have ended.
        """
        here, ended = os.uname().nodename, ""
        run = f"{os.getppid()} {here}"
        while True:
            words = " ".join(map(shlex.quote, (script, run, ended)))
            done = self._low_level_execute_command(f"flock /run sh -c {words}", sudoable=True)
            answer = _ANSWER.search(done["stdout"])
            if done["rc"] or answer is None:
                return f"{_RECORD} cannot be written: {(done['stderr'] or done['stdout']).strip()}"
            holder = answer[1]
            process, _blank, place = holder.partition(" ")
            if holder == run:
                return ""
            if ended or place != here or is_running(process):
                problem = f"{_RECORD}: another run of Ansible changes this node: process {process} on {place}"
                return f"{problem}; run this again when it has ended, or remove the file if it was killed"
            ended = holder

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
