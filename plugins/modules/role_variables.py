#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: role_variables
short_description: Check the names of variables
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Ansible ignores variables that a role does not have, so that a misspelt name silently leaves the default in effect.
    This module finds variables that begin with the name of the role of the task, such as C(service_proxy_mod), and are
    neither in the argument specification of the role nor set by it. It names the variable that was probably meant.
  - Outside of a role it checks the variables of all hosts of the play that begin with a prefix that only the roles and
    playbooks of this collection use, such as C(migrate_directon). It also fails for values of a wrong type, which
    Ansible's filters would take for false or 0, and for C(proxy_hosts), C(proxy_serial) and
    C(proxy_max_fail_percentage) in an inventory, where they have no effect. The playbooks check extra variables (C(-e))
    even before they begin, with the lookup plugin C(kubenode.proxy.hosts).
  - Fails as well if C(--tags) or C(--skip-tags) leave nothing of the whole run but checks like this one.
  - Runs on the controller, as an action plugin, as the first task of each role of this collection.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  strict:
    description:
      - Whether a misspelt name fails the task, and a name that resembles no variable of the role gives a warning. If
        not, a misspelt name gives a warning, and other names are ignored.
      - For roles whose name is distinctive. Variables of other software may begin with a name such as C(agent_).
    type: bool
    default: false
  facts:
    description: Facts that the role itself sets, which are therefore not unknown.
    type: list
    elements: str
    default: []
  files:
    description:
      - Variables that name a file on the controller, or a directory if followed by a slash. Fails if one of them cannot
        be read. Relative paths refer to the current directory, unless a slash precedes the name, which demands absolute
        paths. Empty variables are ignored.
    type: list
    elements: str
    default: []
  writes:
    description: Variables that name a file on the controller that will be written, or a directory, as for O(files).
    type: list
    elements: str
    default: []
  configuration:
    description:
      - The variables with the KubeProxyConfiguration of the host, its NodeProxyConfiguration, and its static Services.
        Fails if the agent would refuse any of them, in the same words, and shows its warnings.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Nothing is changed in any mode.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Check the names of the role's variables
  kubenode.proxy.role_variables:
    strict: true
"""

RETURN = r"""
unknown:
  description: Variables with the prefix that the role, or the collection, does not have.
  type: list
  elements: str
  returned: always
  sample: [service_proxy_mod]
"""
