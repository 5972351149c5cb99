# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared chains in a table that iptables-nft-save cannot show are an error, not an empty table."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import ListedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import Jump, ListedChain
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.system import run

FAMILIES = pytest.mark.parametrize(("family", "nft_family"), [("IPv4", "ip"), ("IPv6", "ip6")])


def resource(family: str, table: str, removal: bool = False) -> ListedChainsResource:
    chain = ListedChain(table, "MINE", ("-j RETURN",), (Jump("OUTPUT"),))
    return ListedChainsResource(detect_variant(family, "nft"), [chain], removal=removal)


def converge(family: str, table: str) -> None:
    wanted = resource(family, table)
    change = difference(*wanted.stage())
    if change:
        wanted.apply(change)
    assert not difference(*resource(family, table).stage())


@FAMILIES
def test_chains_in_a_table_that_cannot_be_shown_are_not_changed(family: str, nft_family: str) -> None:
    converge(family, "filter")
    run(["nft", "add", "chain", nft_family, "filter", "EXT"])
    run(["nft", "add", "rule", nft_family, "filter", "EXT", "meta", "length", "100-200", "counter", "accept"])
    before = run(["nft", "list", "ruleset"])
    for removal in (False, True):
        with pytest.raises(KernelError, match=rf"^table filter of {family}: .* only nft understands") as failure:
            resource(family, "filter", removal).stage()
        assert "\n" not in str(failure.value)
    with pytest.raises(KernelError, match="only nft understands"):
        resource(family, "filter").observe()
    assert run(["nft", "list", "ruleset"]) == before
    # Other tables can be shown.
    converge(family, "mangle")
    run(["nft", "delete", "chain", nft_family, "filter", "EXT"])
    assert not difference(*resource(family, "filter").stage())
