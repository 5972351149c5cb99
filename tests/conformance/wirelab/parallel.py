# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several labs at once: workers, each a process on this machine or a user-mode Linux guest, share out the cases.

They share a directory. A worker takes a case by making a folder in it, which only one of them can, and appends a line
to its own file for every case that it has finished. So the quickest worker runs the most cases, and a guest and its
host need only a common file system.
"""

from __future__ import annotations

import glob
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from .cases import Case
from .report import Row

POLL_SECONDS = 0.1


class Board:
    """The shared directory, seen by a worker."""

    def __init__(self, directory: str, worker: str) -> None:
        self._directory = directory
        self._rows = os.path.join(directory, f"rows-{worker}")

    def take(self, cases: Sequence[Case]) -> Iterator[Case]:
        """Yield, one by one, cases that no other worker has claimed."""
        for case in cases:
            try:
                os.mkdir(os.path.join(self._directory, "taken-" + case.name))
            except FileExistsError:
                continue
            yield case

    def done(self, row: Row) -> None:
        """Report a finished case. On disk when this returns: a guest's file system would keep it to itself."""
        with open(self._rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(row.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Supervisor:
    """The shared directory, seen by the process that started the workers."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}

    def new_rows(self) -> Iterator[Row]:
        """Return the rows that were reported since the last call."""
        for path in sorted(glob.glob(os.path.join(glob.escape(self._directory), "rows-*"))):
            with open(path, encoding="utf-8") as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._read[path] = file.tell()
                    yield Row.from_json(json.loads(line))


def run_workers(
    workers: Collection[Callable[[], int]],
    directory: str,
    cases: Sequence[Case],
    mode: str,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Start the workers, each of which returns an exit status, and collect what they report.

    A case that no worker reported becomes a row with an error, which names how the workers ended.
    """
    endings: list[str] = []

    def work(worker: Callable[[], int]) -> None:
        try:
            status = worker()
        except Exception as error:  # reported below, with the cases that are missing for it
            endings.append(str(error) or repr(error))
        else:
            if status:
                endings.append(f"exit status {status}")

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    supervisor = Supervisor(directory)
    rows: list[Row] = []
    running = True
    while running:
        running = any(thread.is_alive() for thread in threads)
        for row in supervisor.new_rows():
            rows.append(row)
            on_row(row)
        if running:
            time.sleep(POLL_SECONDS)
    reported = {row.case for row in rows}
    for case in cases:
        if case.name not in reported:
            reason = "no worker finished it: " + ("; ".join(endings) or "all ended normally")
            rows.append(Row(case.name, mode, error=reason))
            on_row(rows[-1])
    return sorted(rows, key=lambda row: row.case)
