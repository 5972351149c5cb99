# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A file that cannot grow: the kernel refuses to write it beyond a limit, as it does on a full disk."""

from __future__ import annotations

import contextlib
import resource

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.base.whole_files import write_whole
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.ledger import (
    Flows,
    read_ledger,
    write_ledger,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import Frontend


@contextlib.contextmanager
def files_of_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flows(number):
    return Flows(frozenset(Frontend("UDP", f"10.96.0.{last}", 53) for last in range(1, number + 1)), "digest")


def test_the_last_record_stays_if_the_next_has_no_room(tmp_path):
    write_ledger(str(tmp_path), flows(2))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with files_of_at_most(len(before)), pytest.raises(KernelError, match=f"{path}: cannot be written: File too large"):
        write_ledger(str(tmp_path), flows(200))
    assert path.read_bytes() == before
    write_ledger(str(tmp_path), flows(200))
    assert read_ledger(str(tmp_path)) == flows(200)
    write_ledger(str(tmp_path), flows(1))
    assert read_ledger(str(tmp_path)) == flows(1)


def test_a_file_that_is_replaced_stays_whole_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "file"
    write_whole(str(path), b"old")
    with files_of_at_most(8), pytest.raises(OSError, match="File too large"):
        write_whole(str(path), b"x" * 100)
    assert [item.read_bytes() for item in tmp_path.iterdir()] == [b"old"]
