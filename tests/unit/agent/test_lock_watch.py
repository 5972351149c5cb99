# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Uses of the xtables lock are noticed, also after its file was replaced."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import legacy_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.legacy_tables import LockWatch


def test_use_of_the_lock_file_is_noticed(tmp_path):
    path = tmp_path / "xtables.lock"
    watch = LockWatch(str(path))
    try:
        assert watch.used() is False
        path.touch()
        watch.used()
        with open(path):
            assert watch.used() is False
        assert watch.used() is True
        assert watch.used() is False
    finally:
        watch.close()


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "xtables.lock"
    path.touch()
    watch = LockWatch(str(path))
    assert watch.used() is False
    yield SimpleNamespace(path=path, used=watch.used, use=lambda: path.open("a").close())
    watch.close()


def deleted_and_created(path):
    path.unlink()
    path.touch()


def replaced_while_it_is_held(path):
    holder = path.open("a")
    deleted_and_created(path)
    return holder


def moved_away(path):
    path.rename(path.with_name("old"))
    path.touch()


def replaced_by_another(path):
    other = path.with_name("other")
    other.touch()
    other.rename(path)


REPLACEMENTS = [deleted_and_created, replaced_while_it_is_held, moved_away, replaced_by_another]


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_new_lock_file_may_have_been_used_and_is_watched(lock, replace):
    for _time in range(2):
        holder = replace(lock.path)
        assert lock.used() is True and lock.used() is False
        lock.use()
        assert lock.used() is True and lock.used() is False
        if holder is not None:
            holder.close()
            assert lock.used() is True, "the holder of the deleted file may have changed something last"


def test_a_deleted_lock_file_is_not_used_until_it_is_created_again(lock):
    lock.path.unlink()
    assert lock.used() is False
    lock.use()
    assert lock.used() is True and lock.used() is False
    lock.path.chmod(0o640)
    assert lock.used() is False


def test_a_use_just_before_the_lock_file_is_deleted_is_noticed(lock):
    lock.use()
    lock.path.unlink()
    assert lock.used() is True and lock.used() is False


def test_lost_events_are_a_use_of_the_lock(lock, monkeypatch):
    event = struct.pack("=iIII16s", -1, 0x4000, 0, 16, b"") + struct.pack("=iIII", 1, 0x8000, 0, 0)
    answers = [event, BlockingIOError(), struct.pack("=iIII", 1, 0x8000, 0, 0), BlockingIOError()]

    def read(_descriptor, _size):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(legacy_tables.os, "read", read)
    assert lock.used() is True and lock.used() is False
    assert not answers


def test_without_inotify_the_lock_is_never_used(tmp_path, monkeypatch):
    monkeypatch.setattr(legacy_tables._libc, "inotify_init1", lambda _flags: -1)
    watch = LockWatch(str(tmp_path / "xtables.lock"))
    assert watch.fileno() == -1 and watch.used() is False
    watch.close()
