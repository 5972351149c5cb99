# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The names and numbers of nf_tables attributes, compared with pyroute2's."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import attributes

nftsocket = pytest.importorskip("pyroute2.netlink.nfnetlink.nftsocket")


def tables(item, seen):
    """Yield every class of netlink attributes in a class or module."""
    for value in vars(item).values():
        if isinstance(value, type) and value not in seen:
            seen.add(value)
            yield value
            yield from tables(value, seen)


def known_numbers():
    """Return numbers by name, for attributes whose table begins with number 0 as the kernel's does."""
    found = {}
    for table in tables(nftsocket, set()):
        names = [entry if isinstance(entry, str) else entry[0] for entry in getattr(table, "nla_map", ())]
        if names and names[0].endswith("_UNSPEC"):
            found.update((name, number) for number, name in enumerate(names))
    return found


def test_numbers_are_those_that_pyroute2_uses():
    known = known_numbers()
    ours = {name: number for name, number in vars(attributes).items() if name.startswith("NFTA_")}
    shared = ours.keys() & known.keys()
    assert {name for name in shared if ours[name] != known[name]} == set()
    # Newer attributes, and those that pyroute2 names differently.
    assert len(shared) >= 40, sorted(ours.keys() - shared)
