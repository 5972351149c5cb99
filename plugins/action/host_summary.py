# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run kubenode.proxy.host_summary on the controller, where it prints."""

from __future__ import annotations

from typing import Any, Optional

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.people import for_people


class ActionModule(ActionBase):
    """The action of the module, which has no part that runs on a host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Print the sentence and the lines, and return the result of the task."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validation, options = self.validate_argument_spec(
            {"sentence": {"type": "str", "default": ""}, "lines": {"type": "list", "elements": "str", "default": []}}
        )
        sentence = " ".join(options["sentence"].split())
        named = [f"{(task_vars or {}).get('inventory_hostname', '')}: {sentence}"] if sentence else []
        for line in (*named, *options["lines"]):
            Display().display(**for_people(line, constants.DEFAULT_STDOUT_CALLBACK))
        return {**result, "changed": False, "sentence": sentence}
