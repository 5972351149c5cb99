# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cases that the Makefile selects for ``make test`` exist, in the families and modes they are selected for."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import List

import pytest

from tests.conformance.wirelab.arguments import CASES, HOME
from tests.conformance.wirelab.cases import find_cases
from tests.conformance.wirelab.twins import twins

MAKEFILE = Path(__file__).resolve().parents[3] / "Makefile"


def chosen(variable: str) -> List[str]:
    found = re.search(rf"(?m)^{variable} := ((?:.*\\\n)*.*)$", MAKEFILE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1].replace("\\\n", " ").replace("'", "").split()


@pytest.mark.parametrize(
    ("variable", "modes", "families"),
    [
        ("AREAS", ("iptables", "nftables"), ""),
        ("TWINS", ("iptables",), "dual"),
        ("TWINS", ("nftables",), "ipv6"),
        ("LEGACY", ("iptables",), ""),
        ("IPVS", ("ipvs",), ""),
        ("IPVS_TWINS", ("ipvs",), "ipv6"),
    ],
)
def test_every_chosen_case_is_run(variable, modes, families):
    cases = find_cases([str(HOME / name) for name in CASES], ["*"])
    names = {case.name: case.modes for case in (twins(cases, families) if families else cases)}
    assert chosen(variable)
    for pattern in chosen(variable):
        found = [of for name, of in names.items() if fnmatchcase(name, pattern + (f".{families}" if families else ""))]
        assert found and all(mode in of for of in found for mode in modes), pattern
