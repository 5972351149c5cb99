# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation that the modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """``kubenode.proxy.attributes``: what every module supports, unless the module says otherwise itself.

    ``attributes.posix``: the same for modules that run where the collection is.
    ``attributes.cluster``: for modules that change the cluster.
    """

    DOCUMENTATION = r"""
attributes:
  action_group:
    support: full
    description: Use C(group/kubenode.proxy.proxy) in C(module_defaults) to set defaults for this module.
    membership:
      - kubenode.proxy.proxy
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

    # What else holds for some modules is given before the above, since the first that names an attribute counts.
    POSIX = r"""
attributes:
  platform:
    description: Hosts on which it works.
    support: full
    platforms: posix
"""

    CLUSTER = r"""
attributes:
  check_mode:
    description: Reads from the API server and tells what would change.
    support: full
  platform:
    description: Hosts on which it works.
    support: full
    platforms: posix
requirements:
  - the Python package PyYAML, to read a kubeconfig that is YAML
  - the Python package kubernetes, only for a kubeconfig with an C(auth-provider)
"""
