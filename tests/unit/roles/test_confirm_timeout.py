# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A timeout that a large batch cannot keep is refused before anything is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import local_hosts, play_once

CONVERGENCE = {"ansible.builtin.include_role": {"name": "kubenode.proxy.service_proxy", "tasks_from": "present"}}
PLAY = {"hosts": "all", "gather_facts": False, "tasks": [CONVERGENCE]}


def converge(scratch: Path, hosts: int, forks: int, timeout: float) -> str:
    """Return the output of a convergence that ends at the latest when it reads the cluster's state from no file."""
    variables = f"service_proxy_confirm_timeout={timeout} service_proxy_snapshot=/nonexistent/snapshot"
    inventory = local_hosts({f"h{number}": {} for number in range(hosts)})
    done = play_once(scratch, PLAY, inventory, "-f", str(forks), "-e", variables)
    assert done.returncode != 0
    return done.stdout


@pytest.mark.parametrize(
    ("hosts", "forks", "timeout", "accepted"),
    [(6, 5, 19.0, False), (6, 5, 20.0, True)],
)
def test_the_timeout_must_cover_all_rounds_of_a_batch(
    tmp_path: Path, hosts: int, forks: int, timeout: float, accepted: bool
) -> None:
    text = " ".join(converge(tmp_path, hosts, forks, timeout).split())
    assert ("too short for a batch of 6 hosts with 5 forks" in text) is not accepted
    assert ("/nonexistent/snapshot" in text) is accepted
