# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What other modes than the one in effect have left on the node: removed once this mode serves, and watched for."""

from __future__ import annotations

from typing import Callable, Optional

from ...base.errors import KernelError
from ...convergence.handles import KernelHandles
from ...event_reasons import Reason
from ...kernel.presence import holds_other_mode
from ..api.events import NORMAL
from ..other_proxy import OtherProxy
from ..reports import Reports
from ..threads.collector import trim_memory
from ..threads.failures import error_text
from ..threads.timers import Timers
from .setup import Proxiers, remove_leftovers

DRAIN_SECONDS = 60.0
OTHER_MODE_SECONDS = 30.0


class OtherModes:
    """Removes the leftovers of other modes. ``removed`` is called after every attempt, whether it removed any or not.

    ``proxiers`` returns those of the mode in effect, None before there are any.
    """

    def __init__(
        self,
        handles: KernelHandles,
        timers: Timers,
        *,
        proxiers: Callable[[], Optional[Proxiers]],
        removed: Callable[[], None],
        reports: Reports,
        other_proxy: OtherProxy,
    ) -> None:
        #: Leftovers are to be removed after the next sync that succeeds.
        self.due = False
        self._handles = handles
        self._proxiers = proxiers
        self._removed = removed
        self._log, self._post = reports.log, reports.post
        self._other_proxy = other_proxy
        # Whether the Event about the change to the mode in effect was posted.
        self._mode_posted = False
        self._leftovers = timers.add("remove leftovers of other modes", self.clean_up)
        self._other_mode = timers.add("look for rules of another mode", self._look_for_other_mode)

    def set_up(self, before: Optional[Proxiers], now: Proxiers) -> None:
        """Post an Event if a new configuration has changed the mode of the running agent."""
        # What the previous mode has programmed is not of another program.
        self._other_mode.cancel()
        if before is None or before.configuration.mode == now.configuration.mode:
            return
        note = f"the mode was changed from {before.configuration.mode} to {now.configuration.mode}: {now.mode_reason}"
        self._post(None, NORMAL, Reason.MODE_CHANGED, "Sync", note)
        self._mode_posted = True

    def clean_up(self) -> None:
        """Remove other modes' leftovers now that this mode is serving. Failures are logged and not fatal."""
        proxiers = self._proxiers()
        if proxiers is None:
            return
        if self._other_proxy.text:
            # They may be in use.
            self._leftovers.start(DRAIN_SECONDS)
            return
        self.due = False
        try:
            found = remove_leftovers(proxiers, self._handles)
            if found.removed:
                self._log.info("removed leftovers of another mode", entries=found.removed)
                if not self._mode_posted:
                    # The mode was changed while the agent did not run, or the node uses another variant of iptables.
                    mode = proxiers.configuration.mode
                    note = f"the node serves in {mode} mode: {found.removed} entries that it does not use were removed"
                    self._post(None, NORMAL, Reason.MODE_CHANGED, "Sync", note)
                self._mode_posted = False
            if found.draining:
                text = "real servers of ipvs mode are kept until their connections end"
                self._log.info(text, real_servers=found.draining)
                self._leftovers.start(DRAIN_SECONDS)
        except MemoryError:
            raise
        except Exception as error:
            self._log.warning("leftovers of another mode cannot be removed", error=error_text(error))
        self._removed()
        if self._holds_other_mode() is False:
            # Otherwise rules were kept, for example because rules of other programs refer to them.
            self._other_mode.start(OTHER_MODE_SECONDS)
        trim_memory()

    def _holds_other_mode(self) -> Optional[bool]:
        """Return whether the kernel has rules of another mode; None if that cannot be determined, or no mode serves."""
        proxiers = self._proxiers()
        used = proxiers.mode.subsystems if proxiers is not None and proxiers.mode.serves else None
        try:
            return holds_other_mode(chains=used.chains, table=used.nftables) if used is not None else None
        except KernelError as error:
            self._log.debug("cannot determine whether the kernel holds rules of another mode", error=error)
            return None

    def _look_for_other_mode(self) -> None:
        """Notice a service proxy that programs another mode after all leftovers of it were removed."""
        holds = self._holds_other_mode()
        if holds is not None:
            self._other_proxy.other_mode(holds)
        self._other_mode.start(OTHER_MODE_SECONDS)
