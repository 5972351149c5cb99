#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: agent_libraries
short_description: Bundle the agent's Python libraries for nodes without a package index
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Selects, with pip, the wheels of the agent's libraries for the Python version and machine of a node, and packs them
    into one archive. The node only unpacks it and needs neither pip nor access to a package index.
  - Runs on the controller, with the pip of the Python that runs the module. The role P(kubenode.proxy.agent#role)
    uses it.
  - An archive in O(directory) for the same target, requirements, hashes and wheels is reused.
extends_documentation_fragment:
  - kubenode.proxy.attributes.posix
  - kubenode.proxy.attributes
options:
  directory:
    description: Directory for the archive. It is created if it does not exist.
    type: path
    required: true
  python_version:
    description: Version of the node's Python, for example V(3.11).
    type: str
    required: true
  machine:
    description: Machine of the node, as C(uname -m) prints it. The node's C library must be glibc.
    type: str
    required: true
  requirements:
    description:
      - Names of the packages, each optionally with versions. pip does not verify hashes of the wheels then.
    type: list
    elements: str
    default: [PyYAML, prometheus-client]
  requirements_file:
    description:
      - Requirements file with versions and hashes, as for C(pip --require-hashes), instead of O(requirements). A wheel
        with another hash is refused, whatever its source.
      - The role P(kubenode.proxy.agent#role) contains such a file.
    type: path
  wheelhouse:
    description: Directory of wheels on this host. If given, no package index is used.
    type: path
attributes:
  check_mode:
    description: Reports whether an archive would be created, without creating it.
    support: full
  diff_mode:
    description: The archive is not text.
    support: none
requirements:
  - pip 22 or later
seealso:
  - module: kubenode.proxy.agent_archive
"""

EXAMPLES = r"""
- name: Bundle the libraries for Debian 12 on x86_64
  kubenode.proxy.agent_libraries:
    directory: ~/.cache/kubenode-proxy
    python_version: "3.11"
    machine: x86_64
    requirements_file: requirements-with-hashes.txt
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
path:
  description: Path of the archive.
  type: str
  returned: success
  sample: /home/user/.cache/kubenode-proxy/libraries-3.11-x86_64-0123456789abcdef.tar.gz
error_kind:
  description: The kind of failure, V(configuration) or V(libraries).
  type: str
  returned: failure
  sample: libraries
"""

import os
import sys
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, os_errors
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import libraries as bundle
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.binary_files import replace_file
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run


def _wheels(directory: str) -> list[str]:
    if not directory:
        return []
    with os_errors(ConfigurationError, f"wheelhouse: {directory}"):
        found = [name for name in os.listdir(directory) if name.endswith(".whl")]
    if not found:
        raise ConfigurationError(f"wheelhouse: {directory}: contains no wheels")
    return found


def _pins(path: str) -> bytes:
    if not path:
        return b""
    with os_errors(ConfigurationError, f"requirements_file: {path}"), open(path, "rb") as file:
        return file.read()


def libraries(module: AnsibleModule) -> dict[str, Any]:
    """Return the path of the archive, creating it if it does not exist."""
    parameters = module.params
    directory, wheelhouse = parameters["directory"], parameters["wheelhouse"] or ""
    target = bundle.Target(parameters["python_version"], parameters["machine"])
    pinned = parameters["requirements_file"] or ""
    requirements = [] if pinned else parameters["requirements"]
    path = os.path.join(directory, bundle.cache_name(target, requirements, _wheels(wheelhouse), _pins(pinned)))
    with tempfile.TemporaryDirectory(dir=module.tmpdir) as scratch:
        arguments = bundle.pip_arguments(target, requirements, scratch, wheelhouse, pinned)
        if os.path.exists(path):
            return {"changed": False, "path": path}
        if not module.check_mode:
            bundle.install(sys.executable, arguments)
            with os_errors(ConfigurationError, f"directory: {directory}"):
                os.makedirs(directory, mode=0o700, exist_ok=True)
            replace_file(path, bundle.pack_directory(scratch), check=False)
    return {"changed": True, "path": path}


_OPTIONS = {
    "directory": {"type": "path", "required": True},
    "python_version": {"type": "str", "required": True},
    "machine": {"type": "str", "required": True},
    "requirements": {"type": "list", "elements": "str", "default": ["PyYAML", "prometheus-client"]},
    "requirements_file": {"type": "path"},
    "wheelhouse": {"type": "path"},
}


def main() -> None:
    """Run the module."""
    run(libraries, _OPTIONS)


if __name__ == "__main__":
    main()
