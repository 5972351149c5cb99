# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.kube_proxy_placement in parts, and show between them what it waits for."""

from __future__ import annotations

import math
import time
from typing import Any, Optional

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.people import for_people

_PART_SECONDS = 10.0


class ActionModule(ActionBase):
    """The action of the module."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return the result of the task: that of the last part, with the changes of all."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = self._task.args
        timeout, part = _seconds(given, "wait_timeout", 300.0), _seconds(given, "wait_part", _PART_SECONDS)
        end, first = time.monotonic() + timeout, None
        while True:
            left = min(part, max(end - time.monotonic(), 0.1)) if timeout else 0
            arguments = {**given, "wait_part": left, "continued": first is not None}
            found = self._execute_module(module_args=arguments, task_vars=task_vars)
            first = first or found
            if found.get("failed"):
                return {**result, **found}
            problem = found.get("waiting")
            if problem and time.monotonic() < end:
                line = f"{(task_vars or {}).get('inventory_hostname', '')}: waiting: {problem}"
                Display().display(**for_people(line, constants.DEFAULT_STDOUT_CALLBACK))
                continue
            changed = {key: first[key] for key in ("changed", "changes", "diff") if key in first}
            failure = {"failed": True, "msg": _in_vain(problem, timeout, given)} if problem else {}
            return {**result, **found, **changed, **failure}


def _seconds(given: dict[str, Any], name: str, default: float) -> float:
    """Return an option that is a number of seconds. Raises AnsibleActionFail."""
    value = given.get(name)
    try:
        seconds = default if value is None else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise AnsibleActionFail(f"{name}: {value!r} is not a number of seconds")
    return seconds


def _in_vain(problem: str, timeout: float, given: dict[str, Any]) -> str:
    """Return the error of a wait in vain. The change itself was made, and is not undone."""
    returns = ". It is no longer kept off, so it returns as soon as the node works"
    return f"{problem} after {timeout:g} s{returns if given.get('state') == 'absent' and given.get('nodes') else ''}"
