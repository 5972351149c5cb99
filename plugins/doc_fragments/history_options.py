# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that save the node's state or restore it."""

from __future__ import annotations


class ModuleDocFragment:
    """Document where saved states are stored (``kubenode.proxy.history_options``)."""

    DOCUMENTATION = r"""
options:
  history_directory:
    description:
      - Directory on the node in which states are saved before a change. Use the same directory for all modules. It
        must be owned by root and writable by root only; it is created that way if it does not exist.
    type: path
    default: /var/lib/kubenode-proxy-history
"""
