# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback hooks of a convergence: refuse while a change is pending, save the state, and arm the automatic revert."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Iterator, Optional

from ..base.errors import ConfigurationError, HistoryError, KernelError, PreflightError
from ..base.timestamps import timestamp
from ..configuration.model import KubeProxyConfiguration
from ..convergence.guard import Guard
from ..convergence.handles import KernelHandles
from ..convergence.request import Interfaces, Request
from ..kernel.programs import run
from . import pending, units
from .boot_state import NextBoot
from .directory import HistoryDirectory
from .pending import Pending

_CHECK_SECONDS = 120.0
_LONGEST_SECONDS = 86_400.0


def check_timeout(seconds: float) -> None:
    """Check that changes can be reverted after that many seconds. Raises PreflightError."""
    if not 1 <= seconds <= _LONGEST_SECONDS:
        raise PreflightError(f"confirm_timeout: {seconds:g} is not between 1 and {_LONGEST_SECONDS:g} seconds")
    reason = units.why_not_systemd()
    if reason:
        raise PreflightError(
            f"confirm_timeout: {reason}, so nothing would revert the change; set it to 0 to need no confirmation"
        )


def refuse_if_pending(check: bool = False, removes: bool = False) -> Optional[str]:
    """Raise HistoryError if a change waits to be confirmed; return a warning if its timer no longer exists.

    With ``check`` only warn, and keep the file of the pending change; but a removal is refused before its first step,
    which is such a check. Raises KernelError if systemd does not answer.
    """
    waiting = pending.read()
    if waiting is None:
        # A decision that was cut short leaves the directory, for which the runs of other users are refused.
        return None if check else _remove_leftovers()
    if check and not removes:
        return str(waiting)
    if not units.why_not_systemd():
        if units.is_active(f"{pending.UNIT}.timer") or units.is_active(f"{pending.UNIT}.service"):
            raise HistoryError(
                f"{waiting}: confirm it (service_proxy_confirm or kubenode-proxy confirm), roll it back, or wait"
            )
        if not check:
            pending.clear()
        return (
            f"the change after state {waiting.saved_state} was not confirmed, but its timer no longer exists: "
            "the change stays in effect"
        )
    raise HistoryError(
        f"{waiting}: remove {pending.DIRECTORY} manually, because the timer is not visible to this process"
    )


def _remove_leftovers() -> Optional[str]:
    """Remove the directory of a change that is no longer pending; return a warning on failure."""
    try:
        pending.clear()
    except HistoryError as error:
        return str(error)
    return None


def arm(number: int, seconds: float, history_directory: str, state_directory: str) -> Pending:
    """Have systemd roll back to the saved state after that many seconds, after checking that the rollback would work.

    The caller holds the convergence lock. Nothing is armed if it raises HistoryError, PreflightError or
    ConfigurationError.
    """
    # Imported late: most changes need no confirmation.
    from ..packaging.running import pack_running
    from . import revert

    check_timeout(seconds)
    waiting = Pending(
        saved_state=number,
        armed=time.monotonic(),
        timeout=seconds,
        deadline=timestamp(time.time() + seconds),
        history_directory=history_directory,
        state_directory=state_directory,
    )
    try:
        path = pending.write(waiting, pack_running(revert.__name__))
        command = [sys.executable or "/usr/bin/python3", "-I", "-B", path]
        command += ["--to", str(number), "--history", history_directory, "--state-directory", state_directory]
        trial = run([*command, "--check"], timeout=_CHECK_SECONDS)
        if trial.status:
            message = " ".join(trial.errors.split()) or f"exit status {trial.status}"
            raise HistoryError(f"rolling back to state {number} would not work: {message}")
        units.start_timer(pending.UNIT, seconds, "Revert an unconfirmed change of the service proxy", command)
    except BaseException:
        pending.clear()
        raise
    return waiting._replace(armed=time.monotonic())


class SavingGuard(Guard):
    """Saves the state of the node before a convergence changes it, and arms the revert of an unconfirmed change."""

    def __init__(self, request: Request, handles: KernelHandles, next_boot: Optional[NextBoot] = None) -> None:
        super().__init__(request, handles)
        self._next_boot = next_boot
        self._request = request
        self._handles = handles
        self._configuration: Optional[KubeProxyConfiguration] = None
        self._saved = False

    def begin(self) -> list[str]:
        """Check that the convergence may begin, before it changes anything, and return warnings.

        Raises HistoryError while another change waits to be confirmed, PreflightError if this one could not be
        reverted, ConfigurationError.
        """
        request = self._request
        if request.confirm_timeout and request.state != "present":
            raise ConfigurationError(
                f"confirm_timeout: state {request.state} saves nothing, so the change cannot be reverted: set it to 0"
            )
        if request.confirm_timeout and not request.history_directory:
            raise ConfigurationError("confirm_timeout: reverting needs a saved state, so keep_states must not be 0")
        if request.confirm_timeout:
            check_timeout(request.confirm_timeout)
            if not request.check:
                HistoryDirectory(request.history_directory).check_writable()
        warning = refuse_if_pending(request.check, request.state == "absent")
        return [warning] if warning else []

    def target(self, configuration: KubeProxyConfiguration) -> None:
        """Set the configuration that the node is converged to. No state is saved before this call."""
        self._configuration = configuration

    def before_change(self) -> list[str]:
        """Save the current state, arm the revert if it was requested, and return warnings.

        A state that cannot be written causes only a warning: a full disk must not keep a node from following its
        cluster. If the change must be confirmed, it is an error, raised before anything is changed. Raises
        HistoryError, KernelError.
        """
        request, configuration = self._request, self._configuration
        if configuration is None or not request.history_directory or self._saved:
            return []
        self._saved = True
        try:
            self.saved_state = self._save(configuration)
        except HistoryError as error:
            if request.confirm_timeout:
                raise
            return [f"the previous state is not saved, so the node cannot be rolled back to it: {error}"]
        if request.confirm_timeout:
            waiting = arm(self.saved_state, request.confirm_timeout, request.history_directory, request.state_directory)
            self.confirm_until = waiting.deadline
        return []

    def _save(self, configuration: KubeProxyConfiguration) -> int:
        """Save the current state and return its number. Raises HistoryError, KernelError."""
        # Imported late: most runs change nothing.
        from .state import observe_policies, observe_state
        from .store import History

        if configuration.node_proxy.network_policy.standalone:
            state = observe_policies(self._handles)
        else:
            state = observe_state(self._handles, configuration.uses_ipvs, configuration.ipvs.exclude_cidrs)
        return History(self._request.history_directory, self._request.keep_states).save(state).number

    def after_change(self, mode: str, filter_backend: str, node_name: str, addresses: Interfaces) -> list[str]:
        """Keep what the next boot needs, or with a removal forget it; return a warning on failure.

        The node serves without it. The state of a change that waits to be confirmed does not count yet.
        """
        # Imported late: a run that ends with an error needs nothing of it.
        from .boot_keeping import keep

        modes = (mode, filter_backend)
        return keep(self._request, self._next_boot, modes, node_name, addresses, confirmed=not self.confirm_until)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add instructions for the rollback to the error of a change that fails halfway. Raises KernelError."""
        try:
            yield
        except KernelError as error:
            if self.saved_state is None:
                raise
            how = f"the previous state is saved as {self.saved_state}"
            if self.confirm_until:
                how += f" and the node rolls back to it automatically at {self.confirm_until}"
            raise KernelError(f"{error} ({how})") from error
