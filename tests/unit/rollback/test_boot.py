# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test which state of a node is kept for its next boot, and what of it is restored."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import HistoryError, KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files import cache
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import ledger
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import (
    boot,
    boot_directory,
    boot_handover,
    boot_keeping,
    boot_state,
)
from tests.lab import manifests

OWN = "192.0.2.10"
INTERFACES = (("eth0", OWN), ("lo", "127.0.0.1"))
WEEK = 7 * 86400.0


def _service(name: str, address: str, endpoints: list[Any], namespace: str = "default") -> list[dict[str, Any]]:
    ports = [manifests.port(80, name="web")]
    return [
        manifests.service(name, address, ports, namespace=namespace),
        manifests.endpoint_slice(name, endpoints, ports, namespace=namespace),
    ]


def _cluster() -> list[Any]:
    local, remote = manifests.endpoint("10.244.1.2", "here"), manifests.endpoint("10.244.9.9", "there")
    return [
        manifests.node("here", OWN, "10.244.1.0/24"),
        *_service("kubernetes", "10.96.0.1", [manifests.endpoint("192.0.2.1")]),
        *_service("web", "10.96.0.10", [local, remote, manifests.endpoint(OWN, "here")]),
        {"kind": "Pod", "metadata": {"namespace": "a", "name": "ended"}, "spec": {"nodeName": "here"}},
        {
            "kind": "Pod",
            "metadata": {"namespace": "a", "name": "host"},
            "spec": {"nodeName": "here", "hostNetwork": True},
        },
        {"kind": "Pod", "metadata": {"namespace": "a", "name": "far"}, "spec": {"nodeName": "there"}},
    ]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    path = str(tmp_path / "boot")
    monkeypatch.setattr(boot_directory, "DIRECTORY", path)
    monkeypatch.setattr(boot_keeping, "_write_program", lambda path: Path(path).write_bytes(b"program"))
    monkeypatch.setattr(os, "geteuid", os.getuid)
    return path


def _request(objects: list[Any], **more: Any) -> Request:
    configuration = load({"mode": "nftables"}).configuration
    return Request(ClusterState.from_objects(objects), configuration, objects=lambda: iter(objects), **more)


def _keep(
    objects: list[Any], confirmed: bool = True, wanted: Any = True, source: str = "", backend: str = "", **more: Any
) -> list[str]:
    """Keep what a convergence has programmed; ``boot_directory.DIRECTORY`` is that of the test."""
    more.setdefault("state_directory", f"{os.path.dirname(boot_directory.DIRECTORY)}/run")
    os.makedirs(more["state_directory"], exist_ok=True)
    settings = boot_state.BootSettings(configuration={"mode": "nftables"}, source=source)
    found, modes = boot_state.NextBoot(settings, wanted), ("nftables", backend)
    return boot_keeping.keep(_request(objects, **more), found, modes, "here", INTERFACES, confirmed=confirmed)


def _served(state: boot_state.BootState, most: float = WEEK) -> dict[str, list[str]]:
    cluster = boot.request_of(state, most).cluster
    return {
        name.name: [item.address for each in cluster.slices_of(name).values() for item in each.endpoints]
        for name in cluster.services
    }


def _read() -> boot_state.BootState:
    found = boot_state.read()
    assert found is not None
    return found


def test_what_ran_on_the_node_is_omitted() -> None:
    assert _keep(_cluster()) == []
    state = _read()
    assert _served(state) == {"kubernetes": ["192.0.2.1"], "web": ["10.244.9.9", OWN]}
    request = boot.request_of(state, WEEK)
    assert request.interfaces == INTERFACES and request.node_name == "here" and request.mode == "nftables"
    assert sorted(key.name for key in request.cluster.policy.pods) == ["far", "host"]


def test_of_an_old_state_only_what_everything_needs_is_restored(directory) -> None:
    _keep([*_cluster(), *_service("kube-dns", "10.96.0.53", [], "kube-system")])
    # Scheduled runs of another user show its age.
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o711
    os.utime(f"{directory}/state.json.gz", (1, 1))
    assert sorted(_served(_read())) == ["kube-dns", "kubernetes"]
    # A run without changes has the same state, which counts as new.
    os.utime(f"{directory}/state.json.gz")
    assert "web" in _served(_read())


@pytest.mark.parametrize(
    "item",
    [
        7,
        {"kind": "EndpointSlice", "metadata": {"name": "x", "namespace": "a"}, "endpoints": "all"},
        {"kind": "EndpointSlice", "metadata": 3, "endpoints": [3]},
        {"kind": "Pod", "metadata": {"name": "x", "namespace": "a"}, "spec": "none"},
        {"kind": "Pod", "metadata": {"name": "x", "namespace": "a"}},
        {"kind": "Service", "metadata": {"labels": ["a"]}},
        {"kind": ["Service"]},
        {"metadata": {}},
    ],
)
def test_an_object_that_is_invalid_costs_nothing_else(item: Any) -> None:
    assert _keep([*_cluster(), item]) == []
    for most in (WEEK, -1.0):
        assert _served(_read(), most)["kubernetes"] == ["192.0.2.1"]


def test_an_unconfirmed_state_counts_when_its_change_is_confirmed() -> None:
    _keep(_cluster())
    _keep(_service("new", "10.96.0.11", []), confirmed=False)
    assert "new" not in _served(_read())
    assert boot_directory.confirm() == ()
    assert list(_served(_read())) == ["new"]
    # Nothing waits any more.
    assert boot_directory.confirm() == () and list(_served(_read())) == ["new"]
    _keep(_cluster(), confirmed=False)
    boot_directory.discard_unconfirmed()
    assert boot_directory.confirm() == () and list(_served(_read())) == ["new"]


def test_a_rollback_brings_back_the_state_of_its_time(tmp_path) -> None:
    copies = [str(tmp_path / name) for name in ("none", "first")]
    _keep(_cluster())
    os.utime(boot_directory.path_of("state.json.gz"), (5, 5))
    boot_directory.copy_to(copies[1])
    _keep(_service("new", "10.96.0.11", []))
    assert boot_directory.restore_from(copies[1])
    # It is as old as it was.
    assert "web" in _served(_read(), 1e12) and _read().renewed == 5
    # The rollback warns of it.
    assert not boot_directory.restore_from(copies[0])
    assert boot_state.read() is None
    # It can be undone as well.
    boot_directory.restore_from(copies[1])
    assert "web" in _served(_read(), 1e12)


def test_nothing_is_kept_unless_it_is_wanted_and_a_removal_forgets_it(directory) -> None:
    _keep(_cluster(), wanted=None)
    assert not os.path.exists(directory)
    boot_directory.restore_from("/nowhere")
    assert not os.path.exists(directory)
    _keep(_cluster())
    _keep(_service("new", "10.96.0.11", []), wanted=None)
    assert list(_served(_read())) == ["new"]
    for removing in ({"wanted": False}, {"state": "absent"}, {"state": "handed_over"}):
        _keep(_cluster())
        assert _keep(_cluster(), **removing) == [] and not os.path.exists(directory)


def test_a_node_that_has_converged_since_it_booted_says_so(tmp_path) -> None:
    directory = str(tmp_path / "run")
    os.makedirs(directory)
    assert not ledger.has_converged(directory)
    _keep(_cluster())
    assert ledger.has_converged(directory) and not ledger.booted_from(directory)
    ledger.record_boot(directory, "2026-01-01T00:00:00Z")
    assert ledger.booted_from(directory) == "2026-01-01T00:00:00Z"
    ledger.record_origin(directory, {})
    assert ledger.has_converged(directory) and not ledger.booted_from(directory)


@pytest.fixture
def left(tmp_path, directory, monkeypatch) -> str:
    """Provide the path of what a scheduled run of another user has left, on a node that keeps its state."""
    assert _keep(_cluster(), backend="iptables", source="a") == []
    os.utime(f"{directory}/state.json.gz", (1, 1))
    own = str(tmp_path / "schedule")
    monkeypatch.setattr(boot_handover, "STATE_DIRECTORY", str(tmp_path / "run"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 996)
        # The service manager sorts the directories of a unit.
        patched.setenv("STATE_DIRECTORY", f"{tmp_path}/agent:{own}")
        assert _keep([*_service("new", "10.96.0.11", []), 7, {"kind": "BootSettings"}], wanted=None) == []
    return f"{own}/boot.json.gz"


def test_root_takes_what_a_run_of_another_user_has_programmed(directory, left: str) -> None:
    before = _read().settings
    assert boot.restore_at_boot(0.0, take=left) == []
    state = _read()
    assert _served(state) == {"new": []} and state.renewed > 1 and not os.path.exists(left)
    # So the next run of the role writes its own again.
    assert state.settings == before._replace(source="")
    assert boot.restore_at_boot(0.0, take=left) == [] and _read() == state


@pytest.mark.parametrize("content", [b"", b"x" * 40, None])
def test_root_takes_nothing_that_is_no_cluster_state(directory, left: str, content: Any) -> None:
    if content is None:
        os.rename(left, f"{left}.other")
        os.symlink(f"{left}.other", left)
    else:
        Path(left).write_bytes(content)
    before = _read()
    (warning,) = boot.restore_at_boot(0.0, take=left)
    assert warning.startswith(f"warning: the state for the next boot is not renewed: {left}: ") and _read() == before


def test_root_takes_nothing_older_nor_beside_a_change_that_waits(directory, left: str) -> None:
    content = Path(left).read_bytes()
    os.utime(left, (0, 0))
    assert boot.restore_at_boot(0.0, take=left) == [] and "web" in _served(_read(), 1e12)
    Path(left).write_bytes(content)
    _keep(_cluster(), confirmed=False)
    assert boot.restore_at_boot(0.0, take=left) == [] and "web" in _served(_read(), 1e12)
    assert os.path.exists(boot_directory.path_of("unconfirmed.json.gz"))


def test_a_node_boots_with_the_copy_of_an_agent_that_has_ended(tmp_path, directory, monkeypatch) -> None:
    """Unless it is older or damaged. While the agent is enabled, it serves the node from that copy."""
    copy, enabled, request = str(tmp_path / "copy"), tmp_path / "enabled", _service("new", "10.96.0.11", [])
    monkeypatch.setattr(boot, "DEFAULT_CACHE", copy)
    monkeypatch.setattr(boot, "_AGENT_ENABLED", str(enabled))
    monkeypatch.setattr(boot, "RUNTIME", str(tmp_path / "none"))
    restored: list[Any] = []
    monkeypatch.setattr(boot, "service_proxy_findings", lambda **_options: [])
    monkeypatch.setattr(boot, "run_convergence", lambda request, _guard: restored.append(request) or _refuse())
    _keep(_cluster())
    for state in (None, (1, 1), "damaged"):
        if state is not None:
            cache.write_cache(copy, [json.dumps(item).encode() for item in request], {"Service", "EndpointSlice"})
            os.utime(copy, state if isinstance(state, tuple) else None)
        if state == "damaged":
            Path(copy).write_bytes(b"x")
        with pytest.raises(KernelError, match="restored"):
            boot.restore_at_boot(WEEK)
    enabled.touch()
    os.unlink(copy)
    # It has never followed the cluster.
    with pytest.raises(KernelError, match="restored"):
        boot.restore_at_boot(WEEK)
    assert ["web" in str(list(found.cluster.services)) for found in restored] == [True] * 4
    cache.write_cache(copy, [json.dumps(item).encode() for item in request], {"Service", "EndpointSlice"})
    assert boot.restore_at_boot(WEEK) == ["the agent serves this node from its own copy of the cluster state"]
    enabled.unlink()
    with pytest.raises(KernelError, match="restored"):
        boot.restore_at_boot(WEEK)
    assert [key.name for key in restored[-1].cluster.services] == ["new"]


def _refuse() -> None:
    raise KernelError("restored")


def test_runs_of_other_users_leave_nothing_where_no_state_is_kept(tmp_path, directory, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 996)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "schedule"))
    assert _keep(_cluster()) == [] and not os.path.exists(tmp_path / "schedule")


def test_an_unchanged_state_is_not_written_again(directory) -> None:
    _keep(_cluster(), source="a")
    path = f"{directory}/state.json.gz"
    before = os.stat(path).st_ino
    os.utime(path, (1, 1))
    _keep(_cluster(), source="a")
    assert os.stat(path).st_ino == before and os.stat(path).st_mtime > 1
    _keep(_cluster(), source="b")
    assert os.stat(path).st_ino != before


def test_what_filters_beside_ipvs_is_kept() -> None:
    """Rules of programs that start later, such as Docker's, would decide otherwise."""
    _keep(_cluster(), backend="iptables")
    assert boot.request_of(_read(), WEEK).configuration.node_proxy.ipvs_filter_backend == "iptables"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("machine_identity", lambda: "another", "the state is that of another machine"),
        ("KEPT_OFF_FILE", "/proc/no-mark", "kube-proxy has been let return to this node"),
    ],
)
def test_the_state_of_another_time_or_machine_is_not_restored(tmp_path, monkeypatch, name, value, said) -> None:
    mark = tmp_path / "kept-off"
    mark.touch()
    monkeypatch.setattr(boot, "RUNTIME", str(tmp_path))
    monkeypatch.setattr(boot_keeping, "KEPT_OFF_FILE", str(mark))
    monkeypatch.setattr(boot, "KEPT_OFF_FILE", str(mark))
    _keep(_cluster())
    monkeypatch.setattr(boot, name, value)
    monkeypatch.setattr(boot, "run_convergence", None)
    (line,) = boot.restore_at_boot(WEEK)
    assert line.startswith(said)


def test_a_damaged_program_is_written_again(directory) -> None:
    program = Path(directory, "boot.pyz")
    _keep(_cluster(), source="a")
    for damaged in (b"", b"progra\0"):
        program.write_bytes(damaged)
        _keep(_cluster(), source="a")
        assert program.read_bytes() == b"program"


def test_a_state_is_restored_from_a_disk_that_is_read_only(monkeypatch) -> None:
    """unlink(2) fails there for a file that does not exist, too."""

    def refused(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    _keep(_cluster())
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        boot_directory.discard_unconfirmed()


def test_a_run_for_which_the_boot_has_waited_is_newer(tmp_path, monkeypatch) -> None:
    _keep(_cluster())
    monkeypatch.setattr(boot, "RUNTIME", str(tmp_path / "boot-run"))
    os.makedirs(boot.RUNTIME)

    def waits(request: Request, make_guard: Any) -> None:
        ledger.record_boot(boot.RUNTIME)
        make_guard(request, None).begin()

    monkeypatch.setattr(boot, "run_convergence", waits)
    monkeypatch.setattr(boot, "service_proxy_findings", lambda **_options: [])
    with pytest.raises(HistoryError, match="this node has converged since it booted"):
        boot.restore_at_boot(WEEK)


def test_a_state_that_cannot_be_kept_is_a_warning(directory) -> None:
    os.makedirs(directory, 0o777)
    os.chmod(directory, 0o777)
    (warning,) = _keep(_cluster())
    assert warning.startswith(f"what is programmed is not kept for the next boot: {directory}: ")


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"format": "kubenode-proxy-cluster-state"}\n'])
def test_a_damaged_state_is_refused_in_one_line(directory, content: bytes, capsys) -> None:
    _keep(_cluster())
    with open(f"{directory}/state.json.gz", "wb") as file:
        file.write(content)
    with pytest.raises(HistoryError, match=r"state\.json\.gz"):
        boot_state.read()
    assert boot.main(["--max-age", "1"], lambda **_given: [str(boot_state.read())]) == 0
    assert capsys.readouterr().out.startswith("kubenode-proxy: nothing is restored: ")


def test_whatever_fails_the_boot_continues(capsys) -> None:
    def failing(**_given: Any) -> list[str]:
        raise RecursionError("deep")

    assert boot.main(["--max-age", "1"], failing) == 0
    assert capsys.readouterr().out == "kubenode-proxy: nothing is restored: RecursionError('deep')\n"

    def refused(**_given: Any) -> list[str]:
        raise KernelError("IPv6 chains: no")

    # IPv4 may be programmed by now.
    assert boot.main(["--max-age", "1"], refused) == 0
    assert "the state is not restored, or only in part: IPv6 chains: no" in capsys.readouterr().out


def test_settings_of_another_version_are_refused(monkeypatch) -> None:
    _keep(_cluster())
    monkeypatch.setattr(boot_state, "BootSettings", lambda **_fields: (_ for _ in ()).throw(TypeError("unknown field")))
    with pytest.raises(HistoryError, match="unknown field"):
        boot_state.read()
