# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render no Services, for nodes where another program serves them."""

from __future__ import annotations

from typing import Any, Mapping

from ..base.mode_names import NONE
from ..serviceports.info import ServicePortInfo
from .merged import Entry
from .rendering import Rendering
from .settings import DataplaneSettings


class NoRendering(Rendering[None]):
    """No tables. The endpoints of ServicePorts are still known, for explanations."""

    name = NONE

    def context(self, settings: DataplaneSettings) -> None:
        """See the base class."""

    def static_entries(self, context: None) -> list[Entry]:
        """See the base class."""
        return []

    def entries(self, service_port: ServicePortInfo, context: None) -> list[Entry]:
        """See the base class."""
        return []

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        return {}


RENDERING = NoRendering()
