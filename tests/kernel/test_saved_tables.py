# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A saved table is restored, also where the kernel refuses what it dumps of the rules of others; or it is not saved."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import HistoryError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.raw.reading import RawChain, RawReader
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.raw.resource import RawTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import state

RULES = {
    "MSS of the route": "tcp flags syn tcp option maxseg size set rt mtu",
    "dynamic set without timeout": "update @seen { ip saddr }",
    "statements for each element": "add @seen { ip saddr limit rate 1/second counter } accept",
    "chains without a name": "tcp dport 22 jump {\n accept\n }\n tcp dport 23 goto {\n drop\n }",
    "operating system": 'osf name "Linux" accept',
}


def nft(text: str) -> str:
    return subprocess.run(["nft", "-s", "-f", "-"], input=text, check=True, capture_output=True, text=True).stdout


def load(rule: str) -> None:
    nft(
        "table ip kube-proxy {\n set seen {\n type ipv4_addr\n flags dynamic\n size 100\n }\n"
        f" chain c {{\n type filter hook forward priority 0\n {rule}\n }}\n}}\n"
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_saved_table_is_restored(rule: str) -> None:
    load(rule)
    with KernelHandles() as handles:
        saved = state.observe_state(handles).nftables["IPv4"]
    before = nft("list ruleset")
    assert "kube-proxy" in before and "rehearsal" not in before
    nft("delete table ip kube-proxy")
    resource = RawTableResource("IPv4")
    resource.apply(difference({}, saved))
    assert nft("list ruleset") == before
    assert resource.observe() == saved


def test_a_table_that_could_not_be_restored_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later kernel may dump something else that it refuses; here that is an unknown expression."""
    load(RULES["operating system"])
    everything = RawReader.everything

    def dumped_otherwise(reader: RawReader) -> dict[Any, Any]:
        return {
            key: RawChain(value.definition, tuple(rule.replace(b"osf\0", b"fso\0") for rule in value.rules))
            if isinstance(value, RawChain)
            else value
            for key, value in everything(reader).items()
        }

    monkeypatch.setattr(RawReader, "everything", dumped_otherwise)
    before = nft("list ruleset")
    with KernelHandles() as handles, pytest.raises(HistoryError, match="a rule of chain c could not be restored"):
        state.observe_state(handles)
    assert nft("list ruleset") == before
