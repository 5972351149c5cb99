# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters changed by another program: each is restored independently, and each refusal is logged once."""

from __future__ import annotations

import functools
import io

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.repairs import (
    ServiceRepairs,
    repair_parameters,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import sysctls as node_sysctls
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import (
    HASH_SIZE,
    AtLeast,
    SysctlsResource,
    unchangeable,
)
from tests.unit.agent.reports_in_memory import reports_to

FORWARD = "net.ipv4.ip_forward"
CLOSE_WAIT = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"


class Refusing(SysctlsResource):
    """A kernel that refuses one value."""

    def apply(self, change):
        if FORWARD in change.replaced:
            raise KernelError(f"sysctl {FORWARD}: the kernel refused it")
        super().apply(change)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Provide files in place of /proc/sys."""
    for key, value in ((FORWARD, "1"), (CLOSE_WAIT, "3600"), (HASH_SIZE, "65536")):
        path = tmp_path / "proc/sys" / key.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    for name, bound in (("SysctlsResource", SysctlsResource), ("unchangeable", unchangeable)):
        monkeypatch.setattr(node_sysctls, name, functools.partial(bound, root=str(tmp_path)))
    return lambda key: tmp_path / "proc/sys" / key.replace(".", "/")


WANTED = {FORWARD: 1, CLOSE_WAIT: 3600, HASH_SIZE: AtLeast(65536)}


def test_values_that_match_or_exceed_the_desired_ones_are_kept(kernel):
    assert repair_parameters(WANTED) == ({}, [])
    kernel(HASH_SIZE).write_text("262144\n")
    assert repair_parameters(WANTED) == ({}, [])
    assert kernel(HASH_SIZE).read_text() == "262144\n"


def test_changed_parameters_are_restored(kernel):
    kernel(CLOSE_WAIT).write_text("60\n")
    kernel(HASH_SIZE).write_text("16384\n")
    repaired, refused = repair_parameters(WANTED)
    assert (repaired, refused) == ({CLOSE_WAIT: ("60", "3600"), HASH_SIZE: ("16384", "65536")}, [])
    assert (kernel(CLOSE_WAIT).read_text(), kernel(HASH_SIZE).read_text()) == ("3600", "65536")


def test_a_refused_or_missing_parameter_does_not_prevent_the_others(kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(node_sysctls, "SysctlsResource", functools.partial(Refusing, root=str(tmp_path)))
    for key in (FORWARD, CLOSE_WAIT):
        kernel(key).write_text("0\n")
    kernel(HASH_SIZE).unlink()
    repaired, refused = repair_parameters(WANTED)
    assert repaired == {CLOSE_WAIT: ("0", "3600")}
    assert len(refused) == 2 and FORWARD in refused[0] and "the module nf_conntrack provides it" in refused[1]


def test_read_only_parameters_are_skipped(kernel):
    kernel(CLOSE_WAIT).write_text("60\n")
    kernel(CLOSE_WAIT).chmod(0o444)
    assert repair_parameters(WANTED) == ({}, [])


def test_repairs_are_counted_and_a_refusal_is_logged_once(kernel, tmp_path, monkeypatch):
    stream, events = io.StringIO(), []
    repairs = ServiceRepairs(reports_to(stream, lambda *event: events.append((event[2], event[4]))), other_proxy=None)
    kernel(CLOSE_WAIT).write_text("60\n")
    repairs.repair_parameters(WANTED)
    assert repairs.count == 1 and f"{CLOSE_WAIT} from 60 to 3600" in stream.getvalue()
    monkeypatch.setattr(node_sysctls, "SysctlsResource", functools.partial(Refusing, root=str(tmp_path)))
    kernel(FORWARD).write_text("0\n")
    for _look in range(3):
        repairs.repair_parameters(WANTED)
    assert stream.getvalue().count("cannot be restored") == 1 and repairs.count == 1
    kernel(FORWARD).write_text("1\n")
    repairs.repair_parameters(WANTED)
    kernel(FORWARD).write_text("0\n")
    repairs.repair_parameters(WANTED)
    assert stream.getvalue().count("cannot be restored") == 2
    assert [reason for reason, _note in events] == ["DriftRepaired", "DriftNotRepaired", "DriftNotRepaired"]
    assert events[0][1] == f"kernel parameters: {CLOSE_WAIT} from 60 to 3600" and FORWARD in events[1][1]
