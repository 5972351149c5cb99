# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of user-declared chains in several families and tables: applied as a whole or rolled back."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ..base.errors import KernelError, ProxyError
from ..kernel.xtables.restore import restore
from ..resources import Change
from .iptables_chains import Key, ListedChainsResource, Value
from .provisional import DIRECTORY, Undo, arm, refuse_while_pending, withdraw


class ChainChange(NamedTuple):
    """The change of one family. Its resource is in the state of ``stage``, which has found the change."""

    resource: ListedChainsResource
    change: Change[Key, Value]

    def undo(self, part: Change[Key, Value]) -> Undo:
        """Return the revert of the change or of a part of it."""
        return Undo(self.resource.variant, self.resource.undo_text(part))


def refuse_unconfirmed(changes: Sequence[ChainChange], seconds: int, directory: str = DIRECTORY) -> None:
    """Raise HistoryError if ``apply_changes`` would refuse the changes, since an earlier one waits to be confirmed."""
    tables = {
        (item.resource.family, key.table)
        for item in changes
        for key in (*item.change.added, *item.change.replaced, *item.change.removed)
    }
    if tables:
        refuse_while_pending(None if seconds else tables, directory)


def apply_changes(changes: Sequence[ChainChange], seconds: int, directory: str = DIRECTORY) -> str:
    """Make all changes; with ``seconds`` the node reverts them after that time, unless they are confirmed.

    Returns the name of the provisional change; empty without ``seconds`` and without a change. Raises ProxyError: after
    a failure the changes applied so far are rolled back, and nothing is left to confirm. If the rollback fails as well,
    the error says so, and with ``seconds`` the node tries once more after that time.
    """
    if not any(item.change for item in changes):
        return ""
    refuse_unconfirmed(changes, seconds, directory)
    name = arm([item.undo(item.change) for item in changes], seconds, directory) if seconds else ""
    tried: list[ChainChange] = []
    try:
        for item in changes:
            tried.append(item)
            item.resource.apply(item.change)
    except KernelError as error:
        if name and not withdraw(name, directory):
            raise KernelError(f"{error} (the node has begun to roll the change back)") from error
        raise KernelError(f"{error}{_rolled_back(tried, seconds, directory)}") from error
    return name


def _rolled_back(tried: Sequence[ChainChange], seconds: int, directory: str) -> str:
    """Roll back the applied parts of a failed change; return an addition to its error."""
    undos: list[Undo] = []
    done: list[str] = []
    wait = max(item.resource.wait for item in tried)
    try:
        undos = [item.undo(item.resource.made(item.change)) for item in tried]
        while undos:
            if restore(undos[-1].variant, undos[-1].text, wait=wait):
                done.append(undos[-1].variant.family)
            undos.pop()
    except KernelError as error:
        again = _armed(undos, seconds, directory)
        return f"; the changes made before could not be rolled back: {error}{again}"
    return f" (the changes made before were rolled back: {', '.join(done)})" if done else ""


def _armed(undos: Sequence[Undo], seconds: int, directory: str) -> str:
    if not seconds or not any(undo.text for undo in undos):
        return ""
    try:
        arm(undos, seconds, directory)
    except ProxyError as error:
        return f"; {error}"
    return f"; the node tries again in {seconds} seconds"
