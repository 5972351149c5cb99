# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Like the kernel tests, each of these runs as root in a separate network namespace."""

from __future__ import annotations

from tests.kernel.conftest import own_network_namespace, pytest_sessionstart

__all__ = ["own_network_namespace", "pytest_sessionstart"]
