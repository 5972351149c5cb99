# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedulers of IPVS in the kernel's own sources, and their flags: one row each.

A new scheduler needs a row here, and the documentation. Vendors' schedulers have none: they are known by name alone.
Sources: ``net/netfilter/ipvs/ip_vs_*.c`` and ``include/uapi/linux/ip_vs.h`` of Linux, and ipvsadm for names of flags.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple

SCHEDULER_FLAG_1, SCHEDULER_FLAG_2, SCHEDULER_FLAG_3 = 0x8, 0x10, 0x20
#: The flags of schedulers that hash: to skip real servers of weight 0, and to hash the client's port as well.
FALLBACK, WITH_PORT = SCHEDULER_FLAG_1, SCHEDULER_FLAG_2


class Scheduler(NamedTuple):
    """A scheduler.

    ``for_weights``: the scheduler to use instead if the weights of endpoints differ, since this one ignores them; empty
    if there is none. ``hashes``: a client's address determines its real server, and the flags FALLBACK and WITH_PORT
    exist. ``proportional``: in the long run each real server gets connections by its weight alone. ``node_flags``:
    those that kube-proxy 1.36 sets where it is the scheduler of the node.
    """

    title: str
    for_weights: str
    hashes: bool = False
    proportional: bool = False
    node_flags: int = 0


SCHEDULERS: Mapping[str, Scheduler] = {
    "rr": Scheduler("round robin", "wrr", proportional=True),
    "wrr": Scheduler("weighted round robin", "wrr", proportional=True),
    "lc": Scheduler("least connections", "wlc"),
    "wlc": Scheduler("weighted least connections", "wlc"),
    "lblc": Scheduler("locality-based least connections", "lblc"),
    "lblcr": Scheduler("locality-based least connections with replication", "lblcr"),
    "dh": Scheduler("destination hashing", ""),
    "sh": Scheduler("source hashing", "sh", hashes=True, proportional=True),
    "sed": Scheduler("shortest expected delay", "sed"),
    "nq": Scheduler("never queue", "nq"),
    "fo": Scheduler("weighted failover", "fo"),
    "ovf": Scheduler("weighted overflow", "ovf"),
    "mh": Scheduler(
        "Maglev hashing (kernel 4.18 and later)", "mh", hashes=True, proportional=True, node_flags=WITH_PORT
    ),
    "twos": Scheduler("weighted random twos choice (kernel 5.12 and later)", "twos"),
}


class SchedulerFlag(NamedTuple):
    """A flag: the scheduler that has it, empty for any, and its bit."""

    scheduler: str
    bit: int


SCHEDULER_FLAGS: Mapping[str, SchedulerFlag] = {
    **{
        f"{name}-{word}": SchedulerFlag(name, bit)
        for name in ("sh", "mh")
        for word, bit in (("fallback", FALLBACK), ("port", WITH_PORT))
    },
    "flag-1": SchedulerFlag("", SCHEDULER_FLAG_1),
    "flag-2": SchedulerFlag("", SCHEDULER_FLAG_2),
    "flag-3": SchedulerFlag("", SCHEDULER_FLAG_3),
}


def scheduler_of(name: str) -> Scheduler:
    """Return a scheduler's row; a vendor's scheduler counts as one that heeds weights, and has no other property."""
    return SCHEDULERS.get(name) or Scheduler(name, name)


def flag_names(scheduler: str) -> dict[int, str]:
    """Return the names of the bits for a scheduler; a name of its own precedes ``flag-1`` to ``flag-3``."""
    return {
        flag.bit: name for owner in ("", scheduler) for name, flag in SCHEDULER_FLAGS.items() if flag.scheduler == owner
    }
