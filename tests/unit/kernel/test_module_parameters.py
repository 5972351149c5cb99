# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parameters of kernel modules as users declare them, and as /sys/module shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.module_parameters import (
    ModuleParametersResource,
    ParameterKey,
    modprobe_file,
    parse_parameters,
    same,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

BITS = ParameterKey("ip_vs", "conn_tab_bits")


def test_parameters_become_a_modprobe_file() -> None:
    found = parse_parameters({"ip-vs": {"conn_tab_bits": 20}, "nf_conntrack": {"acct": True, "hashsize": "0x100"}})
    assert modprobe_file(found).splitlines()[1:] == [
        "options ip_vs conn_tab_bits=20",
        "options nf_conntrack acct=1 hashsize=0x100",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ip_vs": 20}, "parameters.ip_vs: not a mapping"),
        ({"ip vs": {"a": 1}}, "kernel module 'ip vs': not a module name"),
        ({"ip_vs": {"a-b": 1}}, "parameters.ip_vs.a-b: not the name of a parameter"),
        ({"ip_vs": {"a": "1 b=2"}}, "parameters.ip_vs.a: '1 b=2' is not a value without spaces and quotes"),
        ({"ip_vs": {"a": "1\noptions x"}}, "is not a value without spaces"),
        ({"ip_vs": {"a": ""}}, "is not a value without spaces"),
        ({"ip-vs": {"a": 1}, "ip_vs": {"a": 2}}, "parameters.ip_vs.a: given twice"),
    ],
)
def test_invalid_parameters_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_parameters(given)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Y\n", "1", True),
        ("N", "0", True),
        ("Y", "0", False),
        ("Y", "true", True),
        ("16", "0x10", True),
        ("16", "17", False),
        ("a,b", "a,b", True),
        ("a,b", "a", False),
    ],
)
def test_values_are_compared_as_the_kernel_reads_them(one: str, other: str, equal: bool) -> None:
    assert same(one, other) is equal is same(other, one)


def test_only_writable_parameters_of_present_modules_are_changed(tmp_path: Path) -> None:
    directory = tmp_path / "sys/module/ip_vs/parameters"
    directory.mkdir(parents=True)
    for name, value, mode in (("conn_tab_bits", "12", 0o444), ("rate", "5", 0o644), ("on", "N", 0o644)):
        (directory / name).write_text(f"{value}\n")
        (directory / name).chmod(mode)
    wanted = parse_parameters({"ip_vs": {"conn_tab_bits": 20, "rate": 7, "on": False, "hidden": 1}, "absent": {"a": 1}})
    resource = ModuleParametersResource(wanted, ["ip_vs"], str(tmp_path))
    change = difference(resource.observe(), resource.wanted)
    assert list(change.replaced) == [BITS, ParameterKey("ip_vs", "rate")]
    assert list(change.added) == [ParameterKey("ip_vs", "hidden")]
    assert resource.unchangeable(change) == {
        ParameterKey("ip_vs", "hidden"): "the module in the kernel neither shows nor declares a parameter hidden",
        BITS: "is 12, wanted 20: can only be set when the module is loaded",
    }
    resource.apply(change)
    assert (directory / "rate").read_text() == "7" and (directory / "conn_tab_bits").read_text() == "12\n"
    assert resource.describe(BITS, "20") == ["ip_vs.conn_tab_bits=20"]


def test_only_the_command_line_sets_parameters_of_built_in_modules_at_boot(tmp_path: Path) -> None:
    directory = tmp_path / "sys/module/zswap/parameters"
    directory.mkdir(parents=True)
    for name, value, mode in (("enabled", "N", 0o644), ("compressor", "lzo", 0o644), ("bits", "8", 0o444)):
        (directory / name).write_text(f"{value}\n")
        (directory / name).chmod(mode)
    given = {"enabled": True, "compressor": "lz4", "bits": 9, "hidden": 1, "unknown": 2}
    wanted = parse_parameters({"zswap": given, "ip_vs": {"a": 1}})
    command_line = tmp_path / "proc/cmdline"
    command_line.parent.mkdir()
    command_line.write_text("quiet zswap.compressor=lz4 zswap.hidden=1 zswap.enabled=0 -- zswap.enabled=1\n")
    resource = ModuleParametersResource(wanted, ["zswap"], str(tmp_path), built_in=["zswap"])
    change = difference(resource.observe(), resource.wanted)
    assert [key.name for key in (*change.replaced, *change.added)] == ["enabled", "compressor", "bits", "unknown"]
    why = "on the kernel's command line, since the module is built into the kernel"
    assert resource.unchangeable(change) == {
        ParameterKey("zswap", "bits"): f"is 8, wanted 9: can only be set at boot, as zswap.bits=9 {why}",
        ParameterKey("zswap", "unknown"): (
            "the module in the kernel neither shows nor declares a parameter unknown; it may be set at boot, as "
            "zswap.unknown=2 " + why
        ),
    }
    lost = resource.lost_at_boot()
    assert [key.name for key in lost] == ["enabled", "bits", "unknown"]
    assert lost[ParameterKey("zswap", "enabled")] == f"is not set at boot, only as zswap.enabled=1 {why}"
    command_line.write_text("zswap.enabled=Y zswap.compressor=lz4 zswap.bits=9 zswap.hidden=1 zswap.unknown=2\n")
    assert resource.lost_at_boot() == {}
    loadable = ModuleParametersResource(wanted, ["zswap"], str(tmp_path))
    assert loadable.lost_at_boot() == {}


def test_a_value_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "sys/module/ip_vs/parameters"
    directory.mkdir(parents=True)
    (directory / "rate").symlink_to("/dev/full")
    resource = ModuleParametersResource({ParameterKey("ip_vs", "rate"): "7"}, ["ip_vs"], str(tmp_path))
    change = difference({ParameterKey("ip_vs", "rate"): "5"}, resource.wanted)
    with pytest.raises(KernelError, match=r"parameter ip_vs.rate: cannot be set to 7: No space left on device"):
        resource.apply(change)
