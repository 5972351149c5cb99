# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The result of the last complete run of ``service_proxy``, if this run would have the same.

Imports nothing of the engine that only a complete run needs (see "Imports inside functions" in docs/architecture.md).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Optional

from ..base.installed import BOOT_STATE
from ..convergence.unchanged.decision import Question, Unchanged, decide

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule


def question(module: AnsibleModule) -> Optional[Question]:
    """Return the input of a run to compare or record; None if the run neither ends early nor leaves a record.

    A cluster state from an API server is read in any case. A preview changes nothing, and a change that must be
    confirmed begins with a complete run.
    """
    options: dict[str, Any] = module.params
    source = options["snapshot"] is not None or options["cluster_state"] is not None
    if options["state"] != "present" or not source:
        return None
    if module.check_mode or options["always_observe"] or options["confirm_timeout"]:
        return None
    paths = [options[name] for name in ("snapshot", "config") if options[name] is not None]
    return Question(options, paths, options["state_directory"], options["lock_timeout"])


def earlier_result(module: AnsibleModule) -> Optional[dict[str, Any]]:
    """Return the result of the last complete run, after its warnings have been passed to Ansible; None to run.

    Raises KernelError.
    """
    started = time.monotonic()
    asked = question(module)
    # Only a complete run can show a difference.
    decision = decide(asked) if asked is not None and not module._diff else None
    if not isinstance(decision, Unchanged):
        return None
    try:
        # What the next boot restores is as young as this run.
        os.utime(BOOT_STATE)
    except OSError:
        if module.params["boot"]:
            # A complete run writes it, or says why it cannot.
            return None
    for warning in decision.warnings:
        module.warn(warning)
    durations = {"unchanged": round(time.monotonic() - started, 3)}
    return {**decision.result, "observed": False, "durations": durations}
