# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``apiServers``: the API servers that the agent uses in addition to its kubeconfig's."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

from ...base.addresses import canonical_address, split_port
from ...cluster.fields import shown
from ..field import AGENT, Field
from ..reader import Section

_PORT = 6443
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.IGNORECASE)
_MOST_SERVERS = 64


class ApiServerSettings(NamedTuple):
    """``alternatives``: host and port of further servers. ``discover``: whether to use those that the cluster names."""

    alternatives: Tuple[Tuple[str, int], ...] = ()
    discover: bool = True


FIELDS = (
    Field(
        "apiServers.servers",
        "api_servers.alternatives",
        "none",
        "all",
        AGENT,
        "API servers of the same cluster, as `ADDRESS`, `NAME` or `ADDRESS:PORT` (6443), for when [that of the "
        "kubeconfig fails](agent.md#several-api-servers)",
    ),
    Field(
        "apiServers.discover",
        "api_servers.discover",
        "`true`",
        "all",
        AGENT,
        "also use the API servers that the cluster names in the EndpointSlice `default/kubernetes`",
    ),
)


def read(section: Section) -> ApiServerSettings:
    """Read and validate the section."""
    servers = []
    texts = section.strings("servers")
    if len(texts) > _MOST_SERVERS:
        section.findings.problem(section.field("servers"), f"has more than {_MOST_SERVERS} servers")
    for index, text in enumerate(texts[:_MOST_SERVERS]):
        server = _host_and_port(text)
        if server is None:
            reason = f"{shown(text)} is not of the form ADDRESS, NAME, ADDRESS:PORT or [ADDRESS]:PORT"
            section.findings.problem(section.field(f"servers[{index}]"), reason)
        else:
            servers.append(server)
    found = ApiServerSettings(tuple(servers), section.flag("discover", True))
    section.finish()
    return found


def _host_and_port(text: str) -> Optional[Tuple[str, int]]:
    found = split_port(text, _PORT)
    if found is None:
        return None
    host = canonical_address(found[0]) or (found[0] if _NAME.fullmatch(found[0]) else "")
    return (host, found[1]) if host else None
