# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that save the node's state or go back to it."""

from __future__ import annotations


class ModuleDocFragment:
    """``kubenode.proxy.history_options``: where saved states are."""

    DOCUMENTATION = r"""
options:
  history_directory:
    description:
      - Directory on the node for the states that are saved before changes, the same for all modules. It must belong to
        root, and no one else may write into it; it is made so if it does not exist.
    type: path
    default: /var/lib/kubenode-proxy-history
"""
