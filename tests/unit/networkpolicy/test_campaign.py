# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random clusters: the table allows what the specification allows, also after changes of single objects."""

from __future__ import annotations

import pytest

from tests.netpol.campaign import differences, gradual_differences


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_table_allows_what_the_oracle_allows(first):
    assert [line for seed in range(first, first + 50) for line in differences(seed)] == []


def test_new_pods_are_isolated_at_once_where_grants_follow():
    found = [gradual_differences(seed) for seed in range(20)]
    assert [line for _later, wrong in found for line in wrong] == []
    assert sum(later for later, _wrong in found) > 30


@pytest.mark.full
def test_new_pods_in_a_thousand_clusters():
    assert [line for seed in range(1000, 2000) for line in gradual_differences(seed)[1]] == []


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 11000, 500))
def test_ten_thousand_clusters(first):
    assert [line for seed in range(first, first + 500) for line in differences(seed)] == []
