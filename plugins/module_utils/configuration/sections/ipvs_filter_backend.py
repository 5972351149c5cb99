# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The field ``ipvsFilterBackend``: the subsystem of the packet filter beside IPVS, in ipvs mode."""

from __future__ import annotations

from typing import Tuple

from ...cluster.fields import shown
from ..field import HONOURED, Field
from ..reader import Section

AUTO = "auto"
FILTER_BACKENDS = (AUTO, "iptables", "nftables")

FIELDS: Tuple[Field, ...] = (
    Field(
        "ipvsFilterBackend",
        "ipvs_filter_backend",
        "`auto`",
        "ipvs",
        HONOURED,
        "what masquerades and filters connections beside IPVS: `iptables` with ipsets, `nftables`, or `auto`, which"
        " keeps the one in use, otherwise selects nftables if supported, otherwise iptables; see"
        " [modes.md](modes.md#ipvs-without-iptables)",
    ),
)


def read(root: Section) -> str:
    """Return the field of the document itself; record an invalid value."""
    filter_backend = root.text("ipvsFilterBackend", AUTO)
    if filter_backend not in FILTER_BACKENDS:
        root.findings.problem(
            "ipvsFilterBackend", f"{shown(filter_backend)} is not one of {', '.join(FILTER_BACKENDS)}"
        )
    return filter_backend
