# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A playbook detects missing requirements before it changes anything."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def test_the_agent_needs_access_before_its_kernel_is_prepared(node):
    ansible = shutil.which("ansible-playbook", path=str(Path(sys.executable).parent))
    words = ["-i", "node,", "-c", "local", "-e", "proxy_hosts=all", "-e", "ansible_become=false", "--check"]
    done = node.run(str(ansible), *words, "kubenode.proxy.agent", check=False)
    assert done.returncode != 0 and "set agent_kubeconfig" in " ".join(done.stdout.split()), done.stdout
    assert "changed=0" in done.stdout and "kubenode.proxy.kernel" not in done.stdout
