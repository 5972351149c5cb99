#!/usr/bin/python
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kubelet_kubeconfig
short_description: Point kubelet to an address that leads to all API servers
version_added: 1.0.0
author:
  - kubenode.proxy contributors (@kubenode)
description:
  - Replaces the C(server) of the current context in kubelet's kubeconfig by O(address), at which a static Service of
    this collection serves the API servers. Nothing else in the file is changed.
  - Before that, every one of O(servers) must present a certificate that the authority of the kubeconfig has signed and
    that contains O(address), or the kubeconfig's C(tls-server-name). Then O(address) itself must present one of these
    certificates. Otherwise the module fails, names what each certificate lacks, and changes nothing.
  - A copy of the previous file is kept beside it, with C(.before-kubenode-proxy) appended to its name. With
    O(state=absent) the server of that file is restored.
  - kubelet reads its kubeconfig at its start only. The module does not restart it, but keeps a record of the change
    until a kubelet that systemd runs as C(kubelet.service) has left the address; see RV(in_use).
extends_documentation_fragment:
  - kubenode.proxy.attributes
options:
  state:
    description:
      - V(present) writes O(address). A file that names it already is not verified again.
      - V(absent) restores the original server, unless another program has changed it
        since, and removes the copy. It needs no other option.
      - With V(absent) and O(address), nothing is restored if this is the address that the file was pointed to. It is
        for an address that stays or replaces another one. With O(servers) as well, nothing is restored either unless
        these have certificates for O(address); one of them is written if the original server does not answer.
    type: str
    choices: [present, absent]
    default: present
  path:
    description: The kubeconfig of kubelet.
    type: path
    default: /etc/kubernetes/kubelet.conf
  address:
    description: The address, as C(ADDRESS), C(ADDRESS:PORT) or C([ADDRESS]:PORT). Required with O(state=present).
    type: str
  servers:
    description: All API servers behind it, in the same forms. Required with O(state=present).
    type: list
    elements: str
  port:
    description: Port where O(address) or an entry of O(servers) has none.
    type: int
    default: 6443
  timeout:
    description: Seconds within which all certificates must have been verified. Failed attempts are repeated until then.
    type: float
    default: 15.0
attributes:
  check_mode:
    description:
      - Verifies the servers as well. That O(address) does not serve them yet is a warning only.
    support: full
notes:
  - Needs root.
requirements:
  - Python 3.9 or later on the node
  - the Python package PyYAML on the node
seealso:
  - module: kubenode.proxy.service_proxy
"""

EXAMPLES = r"""
- name: Point kubelet to the address of all API servers
  kubenode.proxy.kubelet_kubeconfig:
    address: 10.103.97.2
    servers: [192.0.2.11, 192.0.2.12, "192.0.2.13:7443"]
  notify: Restart kubelet

- name: Restore it
  kubenode.proxy.kubelet_kubeconfig:
    state: absent
  notify: Restart kubelet
"""

RETURN = r"""
path:
  description: The kubeconfig, with symbolic links resolved. Empty if O(state=absent) found nothing to restore.
  type: str
  returned: success
  sample: /etc/kubernetes/kubelet.conf
server:
  description: The server in the file after the task.
  type: str
  returned: success
  sample: https://10.103.97.2:6443
backup_file:
  description: The copy of the original file. Empty if there is none.
  type: str
  returned: success
  sample: /etc/kubernetes/kubelet.conf.before-kubenode-proxy
in_use:
  description:
    - The server that the running kubelet still uses, although O(state=absent) has removed it from the file. Empty if
      kubelet was restarted since, does not run, or has never read it.
    - Keep serving that address until kubelet was restarted. Running the module again shows whether it was.
  type: str
  returned: success
  sample: https://10.103.97.2:6443
unread:
  description: Whether the running kubelet must be restarted in order to read the file.
  type: bool
  returned: success
  sample: true
error_kind:
  description: The kind of failure, V(api) or V(configuration).
  type: str
  returned: failure
  sample: api
"""

import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# pylint: disable-next=unused-import
import ansible_collections.kubenode.proxy.plugins.module_utils.module_support.supported_python  # noqa: F401
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.certificate import Place
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import kubelet
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.execution import run, warn
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.kubelet import is_unread

_NOTHING = kubelet.KubeconfigChange("", "", "")


def _store(module: AnsibleModule, path: str, content: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=module.tmpdir, delete=False) as stream:
            stream.write(content)
        module.atomic_move(stream.name, path)
    except Exception as error:
        # Ansible's errors have no type of their own, and the reason is their cause.
        raise ConfigurationError(f"{path}: cannot be written: {error.__cause__ or error}") from error


def converged(module: AnsibleModule) -> dict[str, Any]:
    """Write or restore the server, and return the result."""
    parameters: dict[str, Any] = module.params
    check = bool(module.check_mode)

    def store(path: str, content: bytes) -> None:
        _store(module, path, content)

    def parse(text: str) -> Place:
        return kubelet.parse_place(text, parameters["port"])

    servers = [parse(text) for text in parameters["servers"] or ()]
    seconds = parameters["timeout"]
    if parameters["state"] == "absent":
        kept = parse(parameters["address"]) if parameters["address"] else None
        outcome = kubelet.restore(check=check, store=store, kept=kept, servers=servers, seconds=seconds) or _NOTHING
    else:
        address = parse(parameters["address"])
        outcome = kubelet.point_to(parameters["path"], address, servers, seconds=seconds, check=check, store=store)
    warn(module, outcome.warnings, ())
    header = {"before_header": outcome.path, "after_header": outcome.path}
    before, after = (f"server: {url}\n" if url else "" for url in (outcome.before, outcome.after))
    return {
        "changed": outcome.before != outcome.after,
        "path": outcome.path,
        "server": outcome.after,
        "backup_file": outcome.backup,
        "in_use": outcome.in_use,
        "unread": bool(outcome.in_use) if parameters["state"] == "absent" else is_unread(),
        "diff": [{**header, "before": before, "after": after}] if before != after else [],
    }


_OPTIONS = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "path": {"type": "path", "default": "/etc/kubernetes/kubelet.conf"},
    "address": {"type": "str"},
    "servers": {"type": "list", "elements": "str"},
    "port": {"type": "int", "default": 6443},
    "timeout": {"type": "float", "default": 15.0},
}


def main() -> None:
    """Run the module."""
    run(converged, _OPTIONS, required_if=[("state", "present", ("address", "servers"))])


if __name__ == "__main__":
    main()
