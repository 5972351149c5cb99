# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Declared rules hold addresses, not names that would be resolved once."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import Jump, ListedChain, validate


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("-s db.example.org -j ACCEPT", "db.example.org"),
        ("! --destination beef.de/24 -j ACCEPT", "beef.de"),
        ("-p tcp --dport 22 --src 10.0.0.1,localhost/32 -j ACCEPT", "localhost"),
        ("-m set --match-set trusted src -d '3com.example' -j ACCEPT", "3com.example"),
        ("-d 10.0.0.1 -s admins", "admins"),
    ],
)
def test_host_names_are_refused_in_one_clear_line(rule: str, name: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        validate([ListedChain("filter", "MINE", ("-j RETURN", rule))])
    reason = f"{name}: give an address; a host name would be resolved only once"
    assert str(failure.value) == f"chain filter MINE: rules[1]: {reason}"
    condition = rule.partition(" -j ")[0]
    with pytest.raises(ConfigurationError) as failure:
        validate([ListedChain("filter", "MINE", (), (Jump("INPUT", condition),))])
    assert str(failure.value) == f"chain filter MINE: jumps[0].match: {reason}"


@pytest.mark.parametrize(
    "rule",
    [
        "-s 10.0.0.1/255.255.0.0,10/8 -d 0x7f.1 -j ACCEPT",
        "-s fd00::1,::ffff:10.0.0.1/128 ! -d fe80::/ffff:: -j ACCEPT",
        "-m comment --comment '-s example.org' -j ACCEPT",
        "-m iprange --src-range 10.0.0.1-10.0.0.9 -j DNAT --to-destination 10.0.0.1:80",
        "-s",
        "-s , -j ACCEPT",
    ],
)
def test_every_form_of_an_address_is_left_to_iptables(rule: str) -> None:
    validate([ListedChain("filter", "MINE", (rule,))])
