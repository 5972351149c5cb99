# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes' own end-to-end suite on a real cluster: two nodes in containers, and a control plane beside them."""

from tests import conftest  # noqa: F401 # makes the collection importable
