# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The iptables variants whose chains a clean-up covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import family
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import variant

WORKING = "#!/bin/sh\necho 'iptables v1.8.9 (nf_tables)'\n"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that installs the programs of iptables, with the text of the main one, as the only ones."""

    def install(text):
        for name in ("iptables", "iptables-save", "iptables-restore"):
            (tmp_path / name).write_text(text if name == "iptables" else WORKING)
            (tmp_path / name).chmod(0o755)

    def find(name):
        path = Path(tmp_path, name)
        return str(path) if path.exists() else ""

    monkeypatch.setattr(variant, "find_program", find)
    monkeypatch.setattr(family, "is_supported", lambda protocol: True)
    return install


def test_a_variant_that_is_not_installed_is_left_out(programs):
    assert family.removal_contexts([IPV4]) == []
    programs(WORKING)
    (context,) = family.removal_contexts([IPV4])
    assert context.variant.name == variant.NFT


def test_a_program_that_cannot_be_run_is_an_error(programs):
    """Otherwise a clean-up would report success and leave the chains."""
    programs("#!/nonexistent/interpreter\n")
    with pytest.raises(KernelError, match="cannot be run"):
        family.removal_contexts([IPV4])
