# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The errors that the engine raises, and the rejection of a single invalid object.

Everything the engine raises on purpose is a :class:`ProxyError`: its text is one line that names the object, the field
and the reason, ready to be shown to a user. Modules and the agent catch this one class.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import ContextManager, Iterator, NamedTuple, Sequence

_FRAMES = 6


def one_line(text: str) -> str:
    """Return ``text`` as one printable line: white space becomes single blanks, other control characters a ``?``.

    Names of invalid objects come from outside; escape sequences in them must not reach a terminal or a log.
    """
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def brief_traceback(error: BaseException) -> str:
    """Format the innermost frames of an exception on one line, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)


def defect_text(error: BaseException) -> str:
    """Return an unexpected exception, and where it was raised, on one line."""
    return one_line(f"{type(error).__name__}: {error} ({brief_traceback(error)})")


class ProxyError(Exception):
    """An error that the user can understand and act on; ``str(error)`` is one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


@contextlib.contextmanager
def errors_as(kind: type[ProxyError], doing: str, *caught: type[Exception]) -> Iterator[None]:
    """Turn an error of these types in the ``with`` statement into one of ``kind``: ``doing``, then the reason."""
    try:
        yield
    except caught as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise kind(f"{doing}: {reason or error}") from error


def os_errors(kind: type[ProxyError], doing: str) -> ContextManager[None]:
    """Turn an OSError of the ``with`` statement into one of ``kind``: ``doing``, then the reason of the system."""
    return errors_as(kind, doing, OSError)


class SnapshotError(ProxyError):
    """A snapshot file cannot be read: it is missing, truncated, or neither JSON nor YAML."""


class ApiError(ProxyError):
    """The API server cannot be reached or refuses the request."""


class ConfigurationError(ProxyError):
    """A KubeProxyConfiguration, a kubeconfig or an option is invalid."""


class PreflightError(ProxyError):
    """The node lacks something that the chosen mode needs; nothing has been changed."""


class KernelError(ProxyError):
    """The kernel, or a tool that talks to it, refused a change or a read."""


class NotInstalledError(KernelError):
    """The node lacks a program, which therefore has programmed nothing in the kernel."""


class HistoryError(ProxyError):
    """A saved state of the node cannot be written, read or used, or a change is waiting to be confirmed."""


class UnknownDestination(ProxyError):
    """The destination of a connection names a Service that this node does not serve, and no pod that it knows."""


class Refusal(NamedTuple):
    """One cluster object that is skipped, and why; all other objects are processed.

    ``field`` is a path as kubectl would write it, e.g. ``spec.ports[0].port``; ``namespace`` is empty for
    cluster-scoped kinds. ``source``: the file of a static object, empty for objects of the cluster.
    """

    kind: str
    namespace: str
    name: str
    field: str
    reason: str
    source: str = ""

    def __str__(self) -> str:
        name = self.name[:253] or "(without a name)"
        where = f"{self.namespace[:63]}/{name}" if self.namespace else name
        what = f"{self.field}: {self.reason}" if self.field else self.reason
        source = f"{self.source}: " if self.source else ""
        return one_line(f"{source}{self.kind} {where}: {what}")
