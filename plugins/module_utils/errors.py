# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The errors that the engine raises, and the refusal of one bad object.

Everything the engine raises on purpose is a :class:`ProxyError`: its text is one line that names the object, the
field and the reason, ready to be shown to a person. Modules and the agent catch this one class.
"""

from __future__ import annotations

from typing import NamedTuple


def one_line(text: str) -> str:
    """``text`` on one line and printable: runs of white space become one blank, other control characters a ``?``.

    Names of refused objects come from outside; they must not reach a terminal or a log with escape sequences in them.
    """
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


class ProxyError(Exception):
    """Something the user can understand and act on; ``str(error)`` is one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class SnapshotError(ProxyError):
    """A snapshot file cannot be read as a whole: missing, truncated, not JSON or YAML."""


class ApiError(ProxyError):
    """The API server cannot be reached or refuses the request."""


class ConfigurationError(ProxyError):
    """A KubeProxyConfiguration, a kubeconfig or an option is not valid."""


class PreflightError(ProxyError):
    """The node lacks something that the chosen mode needs; nothing has been touched."""


class KernelError(ProxyError):
    """The kernel, or a tool that speaks to it, refused a change or an observation."""


class HistoryError(ProxyError):
    """A saved state of the node cannot be written, read or used, or a change waits to be confirmed."""


class Refusal(NamedTuple):
    """One object of the cluster that is left out, and why; all others go on.

    ``field`` is a path as kubectl would write it, e.g. ``spec.ports[0].port``; ``namespace`` is empty for
    cluster-scoped kinds.
    """

    kind: str
    namespace: str
    name: str
    field: str
    reason: str

    def __str__(self) -> str:
        name = self.name[:253] or "(without a name)"
        where = f"{self.namespace[:63]}/{name}" if self.namespace else name
        what = f"{self.field}: {self.reason}" if self.field else self.reason
        return one_line(f"{self.kind} {where}: {what}")
