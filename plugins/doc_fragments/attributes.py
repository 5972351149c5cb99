# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that the modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """Document the capabilities of the modules; a module's own ``attributes`` take precedence.

    ``kubenode.proxy.attributes`` is for every module, ``attributes.posix`` for modules that run on the controller,
    ``attributes.cluster`` for modules that change the cluster, ``attributes.info`` for modules that change nothing, and
    ``attributes.api`` for those of the action group ``kubernetes_api`` alone.
    """

    DOCUMENTATION = r"""
attributes:
  action_group:
    support: none
    description: Use C(group/NAME) in C(module_defaults) to set defaults for the modules of an action group.
    membership: []
  check_mode:
    support: full
    description: Can run in C(check_mode) and return the changed status prediction without modifying the node.
  diff_mode:
    support: full
    description: Returns details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
  idempotent:
    support: full
    description: When run twice in a row with the same arguments, the second invocation indicates no change.
  platform:
    support: full
    platforms: linux
    description: Target operating system.
"""

    # Modules list the following fragments before the one above: the first fragment that names an attribute wins.
    POSIX = r"""
attributes:
  platform:
    description: Target operating system.
    support: full
    platforms: posix
"""

    API = r"""
attributes:
  action_group:
    description:
      - Use C(group/kubenode.proxy.kubernetes_api)
        in C(module_defaults) to set options that all modules of the group have.
    support: full
    membership:
      - kubenode.proxy.kubernetes_api
"""

    INFO = r"""
attributes:
  check_mode:
    description: Changes nothing, so that it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing that could be shown as a diff.
    support: none
"""

    CLUSTER = r"""
attributes:
  check_mode:
    description: Reads from the API server and reports what would change, without changing it.
    support: full
  platform:
    description: Target operating system.
    support: full
    platforms: posix
requirements:
  - the Python package PyYAML, to read a kubeconfig in YAML
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
"""
