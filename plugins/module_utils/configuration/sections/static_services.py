# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``staticServices``: where the manifests of static Services are."""

from __future__ import annotations

from typing import NamedTuple

from ...cluster.fields import shown
from ..field import HONOURED, Field
from ..reader import Section

DEFAULT_DIRECTORY = "/etc/kubenode-proxy/services.d"


class StaticServices(NamedTuple):
    """``directory``: of Service and EndpointSlice manifests."""

    directory: str = DEFAULT_DIRECTORY


FIELDS = (
    Field(
        "staticServices.directory",
        "static_services.directory",
        f"`{DEFAULT_DIRECTORY}`",
        "all",
        HONOURED,
        "absolute path of the manifests of [static Services](static-services.md); it need not exist",
    ),
)


def read(section: Section) -> StaticServices:
    """Read and validate the section."""
    directory = section.text("directory", DEFAULT_DIRECTORY)
    if not directory.startswith("/"):
        section.findings.problem(section.field("directory"), f"{shown(directory)} is not an absolute path")
    section.finish()
    return StaticServices(directory)
