# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print the warnings of tasks that changed nothing, which Ansible hides together with their results."""

from __future__ import annotations

DOCUMENTATION = r"""
name: warnings
type: notification
short_description: Print the warnings of tasks that changed nothing
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - With C(display_ok_hosts=false) Ansible prints nothing about a task that changed nothing, not even its warnings.
    This prints them. A warning that was printed already is not repeated.
requirements:
  - enabled by C(callbacks_enabled=kubenode.proxy.warnings), as in the examples of this collection
"""

from typing import Any

from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """Adds to what the callback of the standard output prints."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "kubenode.proxy.warnings"
    CALLBACK_NEEDS_ENABLED = True

    def v2_runner_on_ok(self, result: Any) -> None:
        """Print the warnings of a task."""
        # A copy, since what is handled is removed.
        self._handle_warnings(dict(result._result))

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """Print the warnings of one item of a loop."""
        self.v2_runner_on_ok(result)
