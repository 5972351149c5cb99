# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The directory of saved states: leftovers of a killed writer, and a full disk."""

from __future__ import annotations

import errno
import itertools
import os
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, HistoryError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import request as request_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import sysctl_profile, sysctls
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import (
    directory,
    guard,
    restore,
    stages,
    state,
    store,
)


@pytest.fixture
def history(tmp_path) -> store.History:
    return store.History(str(tmp_path / "history"), keep=2)


def full_disk(*_arguments, **_keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def request(history: store.History, confirm_timeout: float = 0.0) -> request_module.Request:
    return request_module.Request(
        cluster=ClusterState(),
        configuration=KubeProxyConfiguration(),
        history_directory=history.directory,
        confirm_timeout=confirm_timeout,
    )


def test_leftovers_of_killed_writers_are_removed_by_a_later_save(history):
    history.save(state.NodeState())
    names = (".state-000001.json.gz.abc", ".outcomes.json.x_y", ".writable.zz")
    for name in (*names, ".state-000009.json.gz.young", "notes", ".hidden"):
        with open(os.path.join(history.directory, name), "w") as file:
            file.write("x")
        if "young" not in name:
            os.utime(os.path.join(history.directory, name), (0, time.time() - 3600))
    history.save(state.NodeState())
    assert sorted(os.listdir(history.directory)) == [
        *(".hidden", ".state-000009.json.gz.young", "notes", "state-000001.json.gz", "state-000002.json.gz"),
    ]


def test_a_full_disk_is_a_warning_if_nothing_depends_on_the_state(history, monkeypatch):
    monkeypatch.setattr(directory, "write_whole", full_disk)
    monkeypatch.setattr(state, "observe_state", lambda *_arguments: state.NodeState())
    way_back = guard.SavingGuard(request(history), handles=None)
    assert way_back.begin() == []
    way_back.target(KubeProxyConfiguration())
    (warning,) = way_back.before_change()
    assert warning.startswith("the previous state is not saved, so the node cannot be rolled back to it: ")
    assert "No space left on device" in warning
    assert way_back.before_change() == [] and way_back.saved_state is None


def test_a_full_disk_refuses_a_change_that_has_to_be_confirmed_before_anything_is_touched(history, monkeypatch):
    monkeypatch.setattr(guard, "check_timeout", lambda _seconds: None)
    monkeypatch.setattr(directory, "check_room", full_disk)
    with pytest.raises(HistoryError, match=r"history: cannot be written: No space left on device"):
        guard.SavingGuard(request(history, 60.0), handles=None).begin()
    # Later, when the disk fills up in between.
    monkeypatch.undo()
    monkeypatch.setattr(directory, "write_whole", full_disk)
    monkeypatch.setattr(state, "observe_state", lambda *_arguments: state.NodeState())
    way_back = guard.SavingGuard(request(history, 60.0), handles=None)
    way_back.target(KubeProxyConfiguration())
    with pytest.raises(HistoryError, match="No space left on device"):
        way_back.before_change()


def test_the_write_test_leaves_nothing(history):
    history.check_writable()
    assert os.listdir(history.directory) == []


def test_a_saved_state_may_hold_every_parameter_that_any_profile_sets_and_no_other():
    """For every combination of the inputs of a profile."""
    found = set()
    for mode, version, yes in itertools.product(
        ("iptables", "ipvs", "nftables"), ((4, 0, 0), (5, 4, 0), (5, 16, 0), (6, 12, 0)), (False, True)
    ):
        settings = sysctl_profile.ProfileSettings(
            *(mode, version, yes, yes, yes or None, yes, yes),
            conntrack=sysctl_profile.ConntrackProfile(
                maximum=1, timeouts=dict.fromkeys(sysctl_profile.CONNTRACK_TIMEOUTS, 1), be_liberal=True
            ),
        )
        found.update(sysctl_profile.wanted_values(sysctl_profile.profile(settings)))
    assert found == sysctl_profile.KEYS


@pytest.mark.parametrize("name", ["absent", "handed_over"])
def test_a_change_that_saves_no_state_cannot_require_a_confirmation(history, name):
    guarded = guard.SavingGuard(request(history, 60.0)._replace(state=name), handles=None)
    with pytest.raises(ConfigurationError, match=f"confirm_timeout: state {name} saves nothing, .*: set it to 0"):
        guarded.begin()


@pytest.mark.parametrize(
    ("saved", "current", "tracked", "restored"),
    [
        # Raised, although less than twice the tracked connections.
        ("150", "100", "90", True),
        ("150", "200", "90", False),
        ("150", "200", "70", True),
    ],
)
def test_the_connection_tracking_limit_is_kept_only_if_it_would_be_lowered(
    monkeypatch, saved, current, tracked, restored
):
    values = {"net.netfilter.nf_conntrack_max": current, "net.netfilter.nf_conntrack_count": tracked}
    monkeypatch.setattr(stages, "read_value", values.get)
    monkeypatch.setattr(sysctls, "read_value", lambda key, _root: values.get(key))
    monkeypatch.setattr(stages, "unchangeable", lambda _keys: {})
    wanted = {"net.netfilter.nf_conntrack_max": saved}
    stage, warnings = stages._sysctl_stage(state.NodeState(sysctls=wanted))
    assert stage.desired == (wanted if restored else {})
    assert bool(warnings) is not restored


def test_a_rollback_removes_no_saved_state_unless_asked(tmp_path):
    unlimited = store.History(str(tmp_path / "history"), keep=None)
    for _number in range(8):
        unlimited.save(state.NodeState())
    assert len(unlimited.numbers()) == 8
    assert restore.RollbackRequest().keep is None
