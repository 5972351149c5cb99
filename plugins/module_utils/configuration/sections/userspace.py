# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section ``userspace``: limits of the agent where it forwards connections itself, in userspace mode."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ..field import AGENT, Field
from ..reader import Section

_MODE = "userspace"
_MOST = 1 << 20


class UserspaceSection(NamedTuple):
    """``max_connections``, ``max_sessions``: TCP connections and UDP sessions at a time. Times are seconds."""

    max_connections: int = 16384
    max_sessions: int = 8192
    connect_timeout: float = 1.0
    drain_timeout: float = 5.0


FIELDS: Tuple[Field, ...] = (
    Field(
        "userspace.maxConnections",
        "userspace.max_connections",
        "16384",
        _MODE,
        AGENT,
        "TCP connections at a time, from 8; lower if the limit of open files allows fewer",
    ),
    Field(
        "userspace.maxSessions",
        "userspace.max_sessions",
        "8192",
        _MODE,
        AGENT,
        "UDP sessions at a time, from 8; lower if the limit of open files allows fewer",
    ),
    Field(
        "userspace.connectTimeout",
        "userspace.connect_timeout",
        "1s",
        _MODE,
        AGENT,
        "how long one endpoint may take to accept a connection before another one is tried",
    ),
    Field(
        "userspace.drainTimeout",
        "userspace.drain_timeout",
        "5s",
        _MODE,
        AGENT,
        "how long open connections may continue when the agent is stopped, at most 20s",
    ),
)


def read(section: Section) -> UserspaceSection:
    """Return the section; problems are recorded in its findings."""
    default = UserspaceSection()
    found = UserspaceSection(
        max_connections=section.integer("maxConnections", default.max_connections, 8, _MOST),
        max_sessions=section.integer("maxSessions", default.max_sessions, 8, _MOST),
        connect_timeout=section.duration("connectTimeout", default.connect_timeout),
        drain_timeout=section.duration("drainTimeout", default.drain_timeout),
    )
    if not 0.1 <= found.connect_timeout <= 30.0:
        section.findings.problem(section.field("connectTimeout"), "must be between 100ms and 30s")
    if not 0.0 <= found.drain_timeout <= 20.0:
        section.findings.problem(section.field("drainTimeout"), "must be between 0 and 20s")
    section.finish()
    return found
