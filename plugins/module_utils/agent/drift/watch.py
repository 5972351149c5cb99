# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of external changes to what the agent programmed, by the best means that each subsystem offers.

nf_tables (nftables mode, and iptables-nft) and routing netlink send notifications. IPVS and ipset do not: the agent
listens to other programs' requests to them (``netlink_tap``), and reads and compares their contents (``polls``). For
legacy iptables see ``kernel.xtables.legacy_tables``. Detection only makes a family suspect: the agent then observes it
and repairs what differs.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

from ...base.closing import closed_on_error
from ...base.errors import KernelError
from ...convergence.handles import KernelHandles
from ...convergence.modes.mode import Subsystems
from ...kernel.ipvs.outline import ServersContent, ServersOutline
from ...kernel.xtables.chains import ChainsResource
from ...kernel.xtables.variant import LEGACY
from ..other_proxy import OtherProxy
from ..reports import Reports
from ..telemetry.log import Log
from ..threads.failures import error_text
from ..threads.timers import RETRY_SECONDS, Timers
from .netlink_tap import NetlinkTap
from .notifications import AddressWatch, Watch, WatchedFamily, nftables_watch, xtables_nft_watch
from .polls import LegacyWatch, PollWatch, sets_digest

# The agent waits for the end of a burst of changes (iptables -F, ipvsadm -C) and then repairs all of them together.
_SETTLE_SECONDS = 0.1
# Watches that are due within this time are polled now, so that the agent wakes up only once.
_TOGETHER_SECONDS = 0.3


class DriftReport(NamedTuple):
    """Families that need to be observed, each with the reason; whether addresses of the node changed."""

    suspects: dict[str, str]
    addresses: bool


class DriftWatch:
    """All watches on the subsystems of a mode.

    Wait for :meth:`filenos` and :meth:`delay`, then call :meth:`poll`.
    """

    def __init__(
        self, subsystems: Subsystems, families: Sequence[WatchedFamily], handles: KernelHandles, log: Log
    ) -> None:
        self._log = log
        self._addresses = AddressWatch(families, subsystems.device)
        self._watches: list[Watch] = [self._addresses]
        self._closing = ExitStack()
        self._due: dict[Watch, float] = {}
        self._suspects: dict[str, str] = {}
        self._settled_at = 0.0
        with closed_on_error(self):
            if subsystems.nftables or subsystems.ipvs_table:
                self._watches.append(nftables_watch(families))
            if subsystems.chains:
                self._watch_chains(families)
            if subsystems.ipvs:
                self._watch_ipvs([watched.family for watched in families], handles, subsystems.ipsets)

    def _watch_ipvs(self, families: Sequence[str], handles: KernelHandles, ipsets: bool) -> None:
        notified: Callable[[], bool] = bool
        try:
            tap = NetlinkTap(families, handles, ipsets)
        except KernelError as error:
            self._log.info("external changes to IPVS and ipsets are only detected by polling", reason=error)
        else:
            self._watches.append(tap)

            def notified() -> bool:
                return tap.active

        outline = self._closing.enter_context(closing(ServersOutline()))
        self._watches.append(PollWatch("IPVS", families, read=ServersContent(), outline=outline, notified=notified))
        if not ipsets:
            return
        content, headers = (sets_digest(handles, families, header_only) for header_only in (False, True))
        self._watches.append(PollWatch("ipsets", families, read=content, outline=headers, notified=notified))

    def _watch_chains(self, families: Sequence[WatchedFamily]) -> None:
        resources = [stage.resource for family in families for stage in family.stages]
        chains = [item for item in resources if isinstance(item, ChainsResource)]
        legacy = [item for item in chains if item.variant.name == LEGACY]
        others = [item for item in chains if item.variant.name != LEGACY]
        if others:
            self._watches.append(xtables_nft_watch(others))
        if legacy:
            self._watches.append(LegacyWatch(legacy))

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [number for number in (watch.fileno() for watch in self._watches) if number >= 0]

    def delay(self, now: float) -> float:
        """Return the seconds until :meth:`poll` should be called even if nothing becomes readable."""
        times = list(self._due.values())
        if self._suspects:
            times.append(self._settled_at)
        times += [now for watch in self._watches if watch.interval and watch not in self._due]
        times += [now + rest for rest in (watch.rest() for watch in self._watches) if rest]
        return max(0.0, min(times) - now) if times else float("inf")

    def poll(self, now: float) -> DriftReport:
        """Return the detected changes, once the burst of changes is over."""
        fresh: dict[str, str] = {}
        for watch in self._watches:
            if watch.interval and now + _TOGETHER_SECONDS < self._due.get(watch, 0.0) and watch.fileno() < 0:
                continue
            try:
                watch.poll(fresh)
            except KernelError as error:
                self._log.warning("the kernel cannot be watched", error=error)
            if watch.interval:
                self._due[watch] = now + watch.interval
        if fresh and not self._suspects:
            self._settled_at = now + _SETTLE_SECONDS
        for family, reason in fresh.items():
            self._suspects.setdefault(family, reason)
        addresses, self._addresses.changed = self._addresses.changed, False
        if not self._suspects or now < self._settled_at:
            return DriftReport({}, addresses)
        ripe, self._suspects = self._suspects, {}
        return DriftReport(ripe, addresses)

    def synced(self, changed: bool, observed: bool) -> None:
        """Handle the end of a good sync. ``changed``: it changed something; ``observed``: it observed everything."""
        for watch in self._watches:
            try:
                watch.synced(changed, observed)
            except KernelError as error:
                self._log.warning("the kernel cannot be watched", error=error)

    def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.close()
        self._closing.close()


class Watching:
    """Watches a node from its first sync on, for what the next sync must compare with the kernel.

    ``drift``: the watch for changes by other programs; None before the first sync, and while it cannot be opened.

    ``suspect`` is called with a family and the reason; later, if another service proxy would revert a repair now.
    ``request`` is called when it is that time, ``addresses_changed`` when addresses of the node have changed, and
    ``reopen`` some time after the drift watch could not be opened, or has failed.
    """

    def __init__(
        self,
        handles: KernelHandles,
        timers: Timers,
        reports: Reports,
        other_proxy: OtherProxy,
        *,
        suspect: Callable[[str, str], None],
        request: Callable[[], None],
        addresses_changed: Callable[[], None],
        reopen: Callable[[], None],
    ) -> None:
        self.drift: Optional[DriftWatch] = None
        self._handles = handles
        self._clock = timers.clock
        self._log, self._limited = reports.log, reports.limited
        self._other_proxy = other_proxy
        self._suspect = suspect
        self._request = request
        self._addresses_changed = addresses_changed
        # Families whose repair is put off, with the reason for it.
        self._unrepaired: dict[str, str] = {}
        self._put_off = timers.add("repair what was put off", self._repair_put_off)
        self._retry = timers.add("watch for changes by other programs", reopen)

    def open(self, subsystems: Subsystems, families: Sequence[WatchedFamily]) -> None:
        """Watch for changes by other programs; if that is not possible now, try again later."""
        try:
            self.drift = DriftWatch(subsystems, families, self._handles, self._log)
        except MemoryError:
            raise
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        """Close the watch."""
        if self.drift is not None:
            self.drift.close()
            self.drift = None

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for."""
        return self.drift.filenos() if self.drift is not None else []

    def delay(self) -> float:
        """Return the seconds until :meth:`poll` must be called even if nothing becomes readable."""
        return self.drift.delay(self._clock()) if self.drift is not None else float("inf")

    def poll(self) -> None:
        """Notice changes by other programs, and of the node's addresses."""
        if self.drift is None:
            return
        try:
            found = self.drift.poll(self._clock())
        except MemoryError:
            raise
        except Exception as error:
            # Its descriptors may be readable forever.
            self.close()
            self._failed(error)
            return
        if found.addresses:
            self._addresses_changed()
        self.suspect(found.suspects)

    def suspect(self, families: Mapping[str, str]) -> None:
        """Have the next sync compare families, each with the reason, unless another service proxy would revert it."""
        if families and self._other_proxy.pause:
            self._unrepaired.update(families)
            self._put_off.start(self._other_proxy.pause)
            return
        for family, reason in families.items():
            self._suspect(family, reason)

    def _repair_put_off(self) -> None:
        unrepaired, self._unrepaired = self._unrepaired, {}
        self.suspect(unrepaired)
        self._request()

    def synced(self, changed: bool, observed: bool) -> None:
        """Handle the end of a good sync. ``changed``: it changed something; ``observed``: it observed everything."""
        if self.drift is not None:
            self.drift.synced(changed, observed)

    def _failed(self, error: Exception) -> None:
        text = "changes by other programs cannot be watched, retrying"
        self._limited.warning("watch", text, error=error_text(error))
        self._retry.start(RETRY_SECONDS)
