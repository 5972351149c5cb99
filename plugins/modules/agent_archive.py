#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: agent_archive
short_description: Pack the collection's engine into one executable file
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Packs the Python source of the engine into a zip application, the node command C(kubenode-proxy).
  - The same source always produces the same bytes.
  - The version of the application consists of the version of the collection and the hash of the source.
  - Runs on the controller, where the collection is installed. The role P(kubenode.proxy.agent#role) uses it.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  source:
    description: Directory C(plugins/module_utils) of the collection.
    type: path
    required: true
  path:
    description:
      - Path of the file to write. It is replaced atomically, and only if its content differs.
      - If not given, the module writes nothing and returns only the version.
    type: path
  interpreter:
    description: Interpreter in the first line (C(#!)) of the application.
    type: path
    default: /usr/bin/python3
attributes:
  check_mode:
    description: Reports whether the file would change, without writing it.
    support: full
  diff_mode:
    description: The file is not text.
    support: none
seealso:
  - module: kubenode.proxy.agent_libraries
"""

EXAMPLES = r"""
- name: Pack the engine of a checkout
  kubenode.proxy.agent_archive:
    source: "{{ playbook_dir }}/../plugins/module_utils"
    path: /tmp/kubenode-proxy.pyz
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
version:
  description: Version of the collection and the first 12 digits of RV(engine).
  type: str
  returned: success
  sample: 1.0.0+4be0c6d2c1b7
engine:
  description: SHA-256 of the engine's source files, including their names.
  type: str
  returned: success
  sample: 4be0c6d2c1b7b0ad0f3c0b3a2c0f4d40d3a0a7c5d2a1f6c58c1d8f1f0a2f2b3c
record:
  description: The version of the collection and the complete RV(engine), as in the file C(VERSION) on a node.
  type: str
  returned: success
  sample: 1.0.0+4be0c6d2c1b7b0ad0f3c0b3a2c0f4d40d3a0a7c5d2a1f6c58c1d8f1f0a2f2b3c
path:
  description: Path of the file.
  type: str
  returned: O(path) is given
  sample: /tmp/kubenode-proxy.pyz
size_bytes:
  description: Size of the application in bytes.
  type: int
  returned: O(path) is given
  sample: 245760
error_kind:
  description: The kind of failure, V(configuration).
  type: str
  returned: failure
  sample: configuration
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.binary_files import replace_file
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import source_identity


def archive(module: AnsibleModule) -> dict[str, Any]:
    """Pack the engine, write the file if a path is given and the content differs, and return the version."""
    source, path = module.params["source"], module.params["path"]
    identity = source_identity(source)
    result: dict[str, Any] = {
        "changed": False,
        "version": identity.text,
        "engine": identity.engine,
        "record": identity.record,
    }
    if path is not None:
        content = pack(source, module.params["interpreter"]).content
        changed = replace_file(path, content, check=module.check_mode)
        result.update(changed=changed, path=path, size_bytes=len(content))
    return result


_OPTIONS = {
    "source": {"type": "path", "required": True},
    "path": {"type": "path"},
    "interpreter": {"type": "path", "default": "/usr/bin/python3"},
}


def main() -> None:
    """Run the module."""
    run(archive, _OPTIONS)


if __name__ == "__main__":
    main()
