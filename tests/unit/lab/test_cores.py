# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Guests are spread over the processors, and each counts while it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections import Counter

import pytest

from tests.lab.cores import pinned


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def chosen(count: int) -> list[str]:
    """Return the processors assigned to ``count`` guests that run at the same time."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(pinned()).words[-1] for _ in range(count)]


def test_each_processor_gets_as_many_guests_as_the_others() -> None:
    processors = {str(number) for number in os.sched_getaffinity(0)}
    counts = Counter(chosen(2 * len(processors)))
    assert counts == dict.fromkeys(processors, 2)
    assert len(chosen(1)) == 1


def test_a_guest_reserves_one_processor_until_it_ends() -> None:
    first = chosen(1)
    # Only the guest holds the lock when it has printed its line.
    script = 'line=$(taskset -cp $$); echo "${line##*: }"; exec sleep 60'
    with pinned() as pin:
        assert pin.words[-1:] == first
        guest = subprocess.Popen(
            [*pin.words, "sh", "-c", script], stdout=subprocess.PIPE, text=True, pass_fds=pin.descriptors
        )
    with guest:
        assert guest.stdout is not None and guest.stdout.readline().strip() == first[0]
        with pinned() as other:
            assert (other.words[-1:] == first) is (len(os.sched_getaffinity(0)) == 1)
        guest.kill()
    assert chosen(1) == first
