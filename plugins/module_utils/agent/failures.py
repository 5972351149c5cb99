# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects of the cluster that the agent cannot process because of a defect of its own.

Such a defect must affect only the object that triggers it: ending the agent would leave every other Service out of
date, and again after each restart. A defect that affects many objects is another matter: see :data:`MOST_FAILURES`.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, NamedTuple

from ..cluster.parsing.objects import ObjectKey
from .supervision import failure_text

#: If more objects fail than this, the defect is not about them, and the kernel must stay as it is.
MOST_FAILURES = 10


class Failure(NamedTuple):
    """An object that could not be processed, and the exception with the frames that it passed, on one line."""

    key: ObjectKey
    error: str


class Failures:
    """The objects whose last version could not be processed."""

    def __init__(self) -> None:
        self._errors: Dict[ObjectKey, str] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._errors

    def add(self, key: ObjectKey, error: Exception) -> None:
        """Record that an object could not be processed."""
        self._errors[key] = failure_text(error)

    def discard(self, key: ObjectKey) -> None:
        """Forget the failure of an object, if there was one."""
        if self._errors:
            self._errors.pop(key, None)

    @property
    def all(self) -> FrozenSet[Failure]:
        """Return every failure."""
        return frozenset(Failure(key, error) for key, error in self._errors.items())
