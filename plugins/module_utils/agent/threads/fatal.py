# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Failures that the agent cannot handle while it runs."""

from __future__ import annotations


class Fatal(Exception):
    """The reason why the agent must exit, so that the service manager restarts it."""
