# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the collection importable as ``ansible_collections.kubenode.proxy`` from a plain clone, and share test files.

Ansible finds a collection only below ``ansible_collections/NAMESPACE/NAME``. The clone gets a symbolic link of that
shape, ignored by git, and the link's parent directory is added to the import path.

Several runs with the same TEST_BOARD, a directory, together run each test file once: a run claims a file by creating
a directory there. Two guests need nothing but a common file system. A run of the tests for a kind of guest imports only
files that mention its mark, since importing all of them takes several seconds in a guest.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    # The demonstration, which imports this file, runs without pytest.
    import pytest

ROOT = Path(__file__).resolve().parent.parent
# The slowest files, each run by one worker: they start first, so that none is still running alone at the end.
LONGEST = (
    "test_migration_playbook.py",
    "test_agent_process.py",
    "test_nftables_packets.py",
    "test_laboratory.py",
    "test_service_proxy_playbooks.py",
    "test_in_guest.py",
    "test_agent_ipvs.py",
    "test_leaving.py",
    "test_service_proxy_module.py",
    "test_agent_faults.py",
    "test_migration.py",
    "test_agent_role.py",
)
# The marks of tests that run in a guest only.
GUEST_MARKS = ("uml", "ipvs")
LINK = ROOT / "collections" / "ansible_collections" / "kubenode" / "proxy"


def make_link() -> None:
    """Create the collection link when it is absent; several test runs may do so at the same time."""
    LINK.parent.mkdir(parents=True, exist_ok=True)
    if not LINK.is_symlink():
        with contextlib.suppress(FileExistsError):
            LINK.symlink_to(os.path.relpath(ROOT, LINK.parent))


def mentions(mark: str, path: Path) -> bool:
    """Return whether a file contains the mark of tests for a kind of guest, ``UML`` for instance."""
    text = path.read_text(encoding="utf-8")
    return f"mark.{mark}" in text or re.search(rf"\b{mark.upper()}\b", text) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> Optional[bool]:
    """Skip files that do not mention the mark of a kind of guest where only its tests are selected."""
    selected = str(config.option.markexpr).split(" ")[0]
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if selected in GUEST_MARKS and is_test and not mentions(selected, collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the slowest files to the front; the order within a file is kept.

    Raises AssertionError for a test that a run of the tests for its kind of guest would skip.
    """
    for mark in GUEST_MARKS:
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            assert mentions(mark, path), f"{path}: has tests marked {mark}, so it must mention this mark"
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


TAKEN: dict[Path, bool] = {}


def claims(path: Path) -> bool:
    """Return whether this run executes a file's tests; without a board it executes all."""
    board = os.environ.get("TEST_BOARD")
    if board and path not in TAKEN:
        try:
            Path(board, f"{path.parent.name}-{path.name}").mkdir()
            TAKEN[path] = True
        except FileExistsError:
            TAKEN[path] = False
    return TAKEN.get(path, True)


def pytest_runtest_protocol(item: pytest.Item) -> Optional[bool]:
    """Skip a test whose file another run has claimed."""
    return None if claims(item.path) else True


make_link()
for entry in (ROOT, ROOT / "collections"):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))
