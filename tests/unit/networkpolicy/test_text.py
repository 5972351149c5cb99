# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The names of the table's objects as users see them."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import static_entries
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import TABLE, Options
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.text import describe
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import TABLE_KEY


def test_the_table_has_a_key_of_its_own() -> None:
    entries = static_entries(Options())
    assert TABLE.key in entries and TABLE_KEY not in entries
    assert describe(TABLE.key, True) == ["table inet kubenode-network-policy"]
    assert tuple(TABLE.key) == ("table", "kubenode-network-policy")
