# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the program that Ansible sends to a node for one task, as Ansible does, to run and time it by itself.

``python -m tests.benchmarks.payload MODULE FILE < OPTIONS`` (in JSON)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]


def build_payload(module: str, arguments: Mapping[str, Any], path: Path) -> None:
    """Write the self-contained program of one call of a module to ``path``.

    ``module``: its name (``kubenode.proxy.service_proxy``), or the absolute path of its source.

    The program prints the module's result as JSON, wherever it is run by this Python. It is built by a separate
    process, since Ansible's loader of collections must come before anything imported from one.
    """
    command = [sys.executable, "-m", "tests.benchmarks.payload", module, str(path)]
    subprocess.run(command, input=json.dumps(dict(arguments)), text=True, check=True, cwd=ROOT)


def main(arguments: Sequence[str]) -> int:
    """Build one payload."""
    from ansible.executor.module_common import modify_module
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins.loader import init_plugin_loader, module_loader
    from ansible.template import Templar

    module, path = arguments
    init_plugin_loader([str(ROOT / "collections")])
    source = module
    if not os.path.isabs(module):
        source = module_loader.find_plugin_with_context(module, mod_type=".py").plugin_resolved_path
    built = modify_module(
        module_name=os.path.basename(module),
        module_path=source,
        module_args=json.load(sys.stdin),
        templar=Templar(DataLoader()),
        task_vars={"ansible_python_interpreter": sys.executable},
        module_compression="ZIP_DEFLATED",
    )
    Path(path).write_bytes(built.b_module_data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
