# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Public names are those of the committed list: none changes without being seen."""

from __future__ import annotations

from tests.documentation.public_surface import PAGE, public_names


def test_public_names_are_those_of_the_list() -> None:
    listed, actual = set(PAGE.read_text(encoding="utf-8").splitlines()), set(public_names())
    assert len(actual) > 1000
    missing, added = sorted(listed - actual), sorted(actual - listed)
    advice = "playbooks of users contain these names; if this is meant: python -m tests.documentation.public_surface"
    assert not missing and not added, f"gone: {missing}, new: {added}; {advice}"
