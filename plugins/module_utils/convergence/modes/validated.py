# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modes that need nf_tables: which families the kernel can serve is found by experiment."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ...kernel.nftables.probe import refused_part
from ...rendering.nftables.objects import TableIdentity
from .mode import Families, Mode


class TableNeeds(NamedTuple):
    """The table that a mode needs: its resource and its identity; ``user`` needs it, for messages."""

    resource: str
    identity: TableIdentity
    user: str


class ValidatedMode(Mode):
    """A mode that can serve a family if the kernel accepts ``table``."""

    table: TableNeeds

    def find_families(self, families: Sequence[str]) -> Families:
        """Have the kernel validate a table with everything that the mode uses, without keeping it."""
        resource, identity, user = self.table
        refused = {family: refused_part(family, self.rendering, resource, identity) for family in families}
        why = f"nf_tables refuses rules that {user} needs"
        return Families({}, {family: f"{why}: {part}" for family, part in refused.items() if part})

    def unsupported_reasons(self, families: Sequence[str]) -> list[str]:
        """See the base class."""
        return list(self.find_families(families).missing.values())
