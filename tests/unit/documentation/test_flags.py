# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of kube-proxy's flags in docs/distributions.md agrees with the fields of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.field import NOTHING
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import FIELDS
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load

PAGE = Path(__file__).resolve().parents[3] / "docs" / "distributions.md"
# Fields that only the file can set.
WITHOUT_FLAG = {
    "clientConnection.acceptContentTypes",
    "iptables.snatNodeInternalIP",
    "logging.options",
    "portRange",
    "windowsRunAsService",
    "winkernel",
}
# In nftables mode, these flags set the fields of its block.
SHARED = {"nftables.masqueradeAll", "nftables.masqueradeBit", "nftables.minSyncPeriod", "nftables.syncPeriod"}


def table() -> list[tuple[str, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    rows = text.split("<!-- flags:", 1)[1].split("<!-- end of flags -->", 1)[0].splitlines()
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| `")]
    return [(flag.strip("`"), field.strip("`"), note) for flag, field, note in found]


def test_every_flag_leads_to_a_field_and_every_field_has_a_flag() -> None:
    fields = [field for _flag, field, _note in table()]
    assert len(set(fields)) == len(fields)
    named = {*fields, *re.findall(r"`(nftables\.\w+)`", PAGE.read_text(encoding="utf-8"))}
    assert named == {field.name for field in FIELDS} - WITHOUT_FLAG
    assert named >= SHARED


def test_fields_are_read_from_the_file() -> None:
    """A value of an invalid type is an error for every known field, and a warning for any other."""
    document: dict[str, Any] = {"noSuchField": [{}]}
    for _flag, field, _note in table():
        *parents, last = field.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = [{}]
    with pytest.raises(ConfigurationError) as raised:
        load(document)
    wrong = re.findall(r"(?:: |; )([a-z]\w*(?:\.\w+)?)(?:\[0\])?: ", str(raised.value))
    # Of logging.vmodule only the name is known, since it has no effect.
    assert set(wrong) == {field for _flag, field, _note in table()} - {"logging.vmodule"}


def test_notes_agree_about_effects() -> None:
    without = {field.name for field in FIELDS if field.effect == NOTHING}
    assert {field for _flag, field, note in table() if note == "no effect here"} == without - WITHOUT_FLAG


def test_flags_are_sorted_and_spelt_as_flags() -> None:
    flags = [flag for flag, _field, _note in table()]
    assert flags == sorted(flags, key=lambda flag: flag.lstrip("-").replace("-", " "))
    assert all(re.fullmatch(r"-v|--[a-z]+(-[a-z]+)*", flag) for flag in flags)
