# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files owned by the project are written atomically and stably, and no other file is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.files import FilesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference


def test_files_are_written_replaced_and_removed_without_remains(tmp_path: Path) -> None:
    first, second = str(tmp_path / "new/first.conf"), str(tmp_path / "second.conf")
    Path(second).write_text("old\n")
    Path(second).chmod(0o600)
    resource = FilesResource([first, second])
    desired = {first: "one\n", second: "two\n"}
    change = difference(resource.observe(), desired)
    assert change == Change(added={first: "one\n"}, replaced={second: ("old\n", "two\n")})
    resource.apply(change)
    assert resource.observe() == desired
    assert Path(first).stat().st_mode & 0o777 == 0o644
    assert Path(second).stat().st_mode & 0o777 == 0o600
    assert sorted(item.name for item in tmp_path.iterdir()) == ["new", "second.conf"]
    resource.apply(difference(resource.observe(), {}))
    assert resource.observe() == {}
    resource.apply(Change(removed={first: "one\n"}))  # already gone


def test_files_that_are_not_owned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="not one of the files"):
        FilesResource([str(tmp_path / "a")]).apply(Change(added={str(tmp_path / "b"): ""}))
    assert not (tmp_path / "b").exists()


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    FilesResource([str(tmp_path / "link")]).apply(Change(replaced={str(tmp_path / "link"): ("old", "new")}))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_invalid_paths_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(KernelError, match="not a regular file"):
        FilesResource([str(tmp_path / "directory")]).observe()
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "below")
    with pytest.raises(KernelError, match="cannot be written: "):
        FilesResource([path]).apply(Change(added={path: "x"}))
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_bytes_that_are_not_utf8_compare_as_different(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    resource = FilesResource([str(path)])
    assert difference(resource.observe(), {str(path): "text"}).replaced
