# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The forms of kubeconfigs that are tried."""

from __future__ import annotations

from .file_forms import lists, merges, sections, syntax
from .form import Form
from .server_forms import proxies, servers, trust
from .user_forms import plugins, users


def forms() -> list[Form]:
    """Return all forms."""
    groups = (lists, merges, sections, syntax, servers, trust, proxies, users, plugins)
    return [form for group in groups for form in group()]
