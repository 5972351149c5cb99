# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Defects of the agent: objects of the cluster that it cannot process, and steps of its loop that fail.

A defect must affect only what triggers it: ending the agent would leave every other Service out of date, and again
after each restart.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

from ...base.errors import ProxyError, defect_text
from ...cluster.parsing.objects import ObjectKey
from ..telemetry.log import LimitedLog

#: If more objects fail than this, the defect is not about one of them.
MOST_FAILURES = 10
#: Exceptions that no object triggers: those that are expected, and a lack of memory, which a restart may end.
NOT_OF_ONE_OBJECT = (ProxyError, MemoryError)


def error_text(error: Exception) -> str:
    """Return the text of an expected error; of another exception, a defect, its type and where it was raised, too."""
    return str(error) if isinstance(error, ProxyError) else f"a defect of the agent: {defect_text(error)}"


class Failure(NamedTuple):
    """An object that could not be processed, and the exception with the frames that it passed, on one line."""

    key: ObjectKey
    error: str

    @property
    def name(self) -> str:
        """Kind, namespace and name of the object."""
        return f"{self.key.kind} {self.key.full_name}"


class Failures(dict[ObjectKey, str]):
    """The objects whose last version could not be processed, with the reason of each."""

    def add(self, key: ObjectKey, error: Exception) -> None:
        """Record that an object could not be processed."""
        self[key] = defect_text(error)

    def discard(self, key: ObjectKey) -> bool:
        """Forget the failure of an object; return whether there was one."""
        return self.pop(key, None) is not None

    @property
    def all(self) -> frozenset[Failure]:
        """Return every failure."""
        return frozenset(Failure(key, error) for key, error in self.items())


class Steps:
    """Runs the steps of the main loop, so that an unexpected exception does not end the agent."""

    def __init__(self, limited: LimitedLog) -> None:
        self._limited = limited

    def run(self, name: str, action: Callable[[], object]) -> bool:
        """Run a step; log its failure, and return whether it succeeded.

        Raises Fatal and MemoryError, which only a restart may help against.
        """
        try:
            action()
        except (Fatal, MemoryError):
            raise
        except Exception as error:
            self._limited.error(("step", name), "a step of the agent has failed", step=name, error=error_text(error))
            return False
        return True


class Fatal(Exception):
    """The reason why the agent must exit, so that the service manager restarts it."""
