# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of service_proxy ends early only with a sound record of the last complete run.

A run that fails, is killed or may change anything leaves none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import AGENT, ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged import decision, record, surroundings
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import resource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from tests.kernel.unchanged_node import Node, ask, nft, set_timeout


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_change_during_the_run_leaves_no_record(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = NftablesResource.apply

    def between(self: NftablesResource, change: Any) -> None:
        real(self, change)
        nft("add table inet other")

    nft("flush chain ip kube-proxy services")
    with monkeypatch.context() as patch:
        patch.setattr(NftablesResource, "apply", between)
        assert node.run()["changed"] and not node.record.exists()
    node.settle()
    # One transaction of another program and one of its own that the kernel has not reported.
    monkeypatch.setattr(resource, "generation_in", lambda replies: 0)
    nft("flush chain ip kube-proxy services")
    assert node.run()["changed"] and not node.record.exists()


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resigned(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return what changes the document in a record, with the right digest."""

    def apply(path: Path) -> None:
        document = json.loads(path.read_bytes().partition(b"\n")[2])
        change(document)
        text = json.dumps(document, sort_keys=True).encode()
        path.write_bytes(record._digest(text) + b"\n" + text)

    return apply


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_hard_link(path: Path) -> None:
    os.link(path, path.with_name("another-name"))


RECORDS: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "damaged": damaged,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a FIFO": a_fifo,
    "a symbolic link": a_link,
    "a hard link": a_hard_link,
    "of another user": lambda path: os.chown(path, 65534, -1),
    "writable by others": lambda path: path.chmod(0o620),
    "of another version": resigned(lambda document: document.update(version=2)),
    "without a part": resigned(lambda document: document.pop("state") and None),
    "with an unusable part": resigned(lambda document: document.update(state={"sysctls": 7})),
    "of another engine": resigned(lambda document: document["given"].update(engine="0")),
    "with a part of another type": resigned(lambda document: document.update(given=[])),
    "of no object": lambda path: path.write_bytes(record._digest(b"7") + b"\n7") and None,
}


def test_unusable_records(node: Node) -> None:
    node.settle()
    for what, change in RECORDS.items():
        change(node.record)
        node.must_observe(what)
        assert not node.run()["observed"], f"the record after one that was {what}"
        assert node.record.stat().st_mode & 0o777 == 0o600


def test_files_that_change_during_the_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = surroundings.surroundings

    def touch(*arguments: Any) -> Any:
        os.utime(node.snapshot)
        return real(*arguments)

    monkeypatch.setattr(
        "ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged.recorder.surroundings", touch
    )
    assert node.run()["observed"] and not node.record.exists()


def test_checks_diffs_and_confirmed_changes_observe(node: Node) -> None:
    node.settle()
    before = node.record.read_bytes()
    assert node.run(check=True)["observed"] and node.run(diff=True, check=True)["observed"]
    assert node.record.read_bytes() == before and not node.run()["observed"], "a check changes nothing"
    shown = node.run(diff=True)
    assert shown["observed"] and shown["diff"] == []
    early = node.run()
    assert not early["observed"] and "diff" not in early
    with pytest.raises(ProxyError, match="confirm_timeout"):
        node.run(confirm_timeout=60.0, keep_states=0)


def test_a_change_that_waits_to_be_confirmed(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node.settle()
    monkeypatch.setattr(surroundings, "PENDING", str(tmp_path))
    node.must_observe("a pending change")


def test_runs_that_failed_or_were_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    ledger = node.state / "ledger.json"
    ledger.write_text("{}")
    node.must_observe("another ledger")
    node.settle()
    for error in (KernelError("refused"), KeyboardInterrupt()):

        def refuse(*_arguments: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(NftablesResource, "apply", refuse)
            set_timeout(17)
            nft("flush chain ip kube-proxy services")
            node.run()
        assert not node.record.exists()
        assert node.must_observe("a run that failed")["changed"]
        node.settle()


def test_a_running_agent_and_a_lock_that_is_held(node: Node) -> None:
    node.settle()
    with ConvergenceLock(str(node.state), 1.0, AGENT), pytest.raises(KernelError, match="agent"):
        node.run()
    with ConvergenceLock(str(node.state), 1.0), pytest.raises(KernelError, match="did not end"):
        ask(node, lock_timeout=0.0)
    assert not node.run()["observed"]


def test_removal_leaves_no_record(node: Node) -> None:
    node.settle()
    node.run(state="absent", snapshot=None)
    assert not node.record.exists()


def test_unprivileged_users_keep_no_records(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    monkeypatch.setattr(decision.os, "geteuid", lambda: 1000)
    assert isinstance(ask(node), decision.Changed)


def test_names_that_begin_like_a_record(node: Node) -> None:
    node.settle()
    left = node.state / f".{record.FILE}.abcdef"
    left.write_text("a writer was killed")
    record.forget_record(str(node.state))
    assert not left.exists() and not node.record.exists()
