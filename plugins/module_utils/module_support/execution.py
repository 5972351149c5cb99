# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Running a module: one call into the engine, whose result or one-line error is returned to Ansible."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

from ..base.errors import ProxyError, Refusal
from ..base.ranges import unacceptable

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

# How many invalid objects a warning names; the result lists more of them.
_NAMED = 3


def alone(action: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return the action of a module, which waits for other tasks that change kernel modules and parameters.

    Two of them at once could set the values of one now, and write those of the other for the next boot.
    """

    def waiting(module: AnsibleModule, **known: Any) -> dict[str, Any]:
        # Imported late: most modules do not change the node.
        from ..convergence.runtime.lock import task_lock

        with task_lock("" if module.check_mode else "/run/kubenode-parameters"):
            return action(module, **known)

    return waiting


def root_needed(what: str) -> str:
    """Return the error of a module that is not run as root."""
    return f"{what} needs root: run the task with become: true (it runs as user id {os.geteuid()})"


def run(
    action: Callable[[AnsibleModule], dict[str, Any]],
    options: dict[str, Any],
    known: Callable[[AnsibleModule], Mapping[str, Any]] = lambda _module: {},
    needs_root: str = "",
    **rules: Any,
) -> None:
    """Run a module with these options: exit with the result of ``action``, or fail with the ProxyError that it raises.

    ``known`` returns what is part of the result in both cases. ``needs_root``: what only root may do; others fail at
    once. ``rules``: about several options, as AnsibleModule has them.

    The failure is reported outside the exception handler, because inside it Ansible would append the texts of all
    causes of the exception.
    """
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(argument_spec=options, supports_check_mode=True, **rules)
    if needs_root and os.geteuid():
        module.fail_json(msg=root_needed(needs_root), error_kind="preflight")
    for name, value in module.params.items():
        reason = isinstance(value, (int, float)) and not isinstance(value, bool) and unacceptable(name, value)
        if reason:
            module.fail_json(msg=f"{name}: {reason}", error_kind="configuration")
    # The process ends with the task and creates almost no reference cycles. Repeated collections over all the objects
    # of a large cluster would take a third of the time.
    gc.disable()
    failure: dict[str, str] = {}
    known_now = known(module)
    result: dict[str, Any] = {}
    try:
        result = action(module)
    except ProxyError as error:
        # Imported late: only failures need it.
        from .tables import failure as failed

        failure = failed(error)
    if failure:
        module.fail_json(**known_now, **failure)
    module.exit_json(**{**known_now, **result})


def warn(
    module: AnsibleModule, warnings: Iterable[str], refused: Sequence[Refusal], skipped: Sequence[Refusal] = ()
) -> None:
    """Pass the engine's warnings to Ansible; see :func:`warning_lines`."""
    for line in warning_lines(warnings, refused, skipped):
        module.warn(line)


def warning_lines(warnings: Iterable[str], refused: Sequence[Refusal], skipped: Sequence[Refusal] = ()) -> list[str]:
    """Return the engine's warnings, one that names the first few skipped objects, and one for skipped parts of them."""
    lines = list(dict.fromkeys(warnings))
    for what, several, found in (
        ("invalid object of the cluster was", "invalid objects of the cluster were", refused),
        ("invalid part of an object of the cluster was", "invalid parts of objects of the cluster were", skipped),
    ):
        if found:
            named = "; ".join(str(item) for item in found[:_NAMED])
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            lines.append(f"{len(found)} {what if len(found) == 1 else several} skipped: {named}{more}")
    return lines
