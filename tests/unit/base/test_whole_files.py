# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files are replaced atomically, no temporary file is left, and nothing is written through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base import whole_files
from ansible_collections.kubenode.proxy.plugins.module_utils.base.timestamps import timestamp
from ansible_collections.kubenode.proxy.plugins.module_utils.base.whole_files import write_whole


def test_a_new_file_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    write_whole(str(tmp_path / "file"), b"\x00\xff")
    assert (tmp_path / "file").read_bytes() == b"\x00\xff"
    assert (tmp_path / "file").stat().st_mode & 0o7777 == 0o600
    write_whole(str(tmp_path / "file"), b"new", 0o644)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o7777 == 0o644
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_without_a_directory_is_in_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("file", b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_replaced_and_its_target_is_kept(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of others")
    (tmp_path / "file").symlink_to("other")
    write_whole(str(tmp_path / "file"), b"ours")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "other").read_text() == "of others"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(str(tmp_path / "file"), b"new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_removal_and_a_renaming_are_written_out_with_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss brings a removed state back, as tests/systemd/test_power_cuts.py has shown."""
    synced: list[int] = []
    monkeypatch.setattr(whole_files.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    directory = tmp_path.stat().st_ino
    for name in ("file", "other"):
        (tmp_path / name).write_text("text")
    whole_files.rename_durably(str(tmp_path / "file"), str(tmp_path / "other"))
    assert synced == [directory] and os.listdir(tmp_path) == ["other"]
    assert whole_files.unlink_durably(str(tmp_path / "other"))
    assert synced == [directory] * 2 and os.listdir(tmp_path) == []
    assert not whole_files.unlink_durably(str(tmp_path / "other"))
    (tmp_path / "file").write_text("text")
    whole_files.remove_file(str(tmp_path / "file"))
    assert synced == [directory] * 3


def test_a_directory_that_another_process_has_removed_by_now_needs_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of convergences is removed with its directory, by each of several processes."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").touch()
    really_unlink = os.unlink

    def unlink(path: str) -> None:
        really_unlink(path)
        (tmp_path / "state").rmdir()

    monkeypatch.setattr(whole_files.os, "unlink", unlink)
    assert whole_files.unlink_durably(str(tmp_path / "state" / "lock"))


def test_times_are_in_utc_without_fractions() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00Z"
    assert timestamp(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert timestamp() >= "2025-01-01T00:00:00Z"
