# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects that are closed at the end of a ``with`` statement, always or if it fails."""

from __future__ import annotations

import contextlib
from typing import Iterator, Protocol, TypeVar

Self = TypeVar("Self", bound="Closing")


class Closable(Protocol):
    """What holds something until it is closed, such as a socket."""

    def close(self) -> None:
        """Release it; closing twice is harmless."""


class Closing:
    """A context manager whose end calls ``close``."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the object holds; closing twice is harmless."""
        raise NotImplementedError


@contextlib.contextmanager
def closed_on_error(opened: Closable) -> Iterator[None]:
    """Close what was opened just before if the ``with`` statement, which prepares it for use, fails."""
    try:
        yield
    except BaseException:
        opened.close()
        raise
