# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare ways to assign slots to endpoints: Maglev, rendezvous hashing, and the bounded form of it that is used.

Run from the top of the repository: ``.venv/bin/python -m tests.benchmarks.hashing [--clusters 100]``. Columns: the
algorithm; endpoints; slots of the busiest endpoint to the mean, the worst of all clusters; slots that change hands when
one endpoint is removed, in percent, mean and worst; those of them that need not, in percent, mean; elements of the map
that change; milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections import Counter
from typing import Callable, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import SLOTS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.slots import assigned

COUNTS = (3, 5, 10, 20, 50, 100)
#: Maglev needs a prime.
PRIME = 601


def maglev(endpoints: Sequence[str]) -> list[str]:
    """Assign slots as Eisenbud et al. describe (NSDI 2016)."""
    owners = [""] * PRIME
    states = []
    for text in endpoints:
        digest = hashlib.sha256(text.encode()).digest()
        first, step = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
        states.append([first % PRIME, step % (PRIME - 1) + 1])
    free = PRIME
    while free:
        for text, state in zip(endpoints, states):
            while owners[state[0]]:
                state[0] = (state[0] + state[1]) % PRIME
            owners[state[0]] = text
            free -= 1
            if not free:
                break
    return owners


def rendezvous(endpoints: Sequence[str]) -> list[str]:
    """Assign each slot to the endpoint with the highest hash."""
    draws = {text: hashlib.shake_128(text.encode()).digest(4 * SLOTS) for text in endpoints}
    return [max(endpoints, key=lambda text: draws[text][4 * slot : 4 * slot + 4]) for slot in range(SLOTS)]


def bounded(endpoints: Sequence[str]) -> list[str]:
    """Assign slots as nftables mode does."""
    return [endpoints[position] for position in assigned(tuple((text, 1) for text in endpoints))]


WAYS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "Maglev": maglev,
    "rendezvous": rendezvous,
    "bounded rendezvous": bounded,
}


def cluster(source: random.Random, count: int) -> list[str]:
    """Return endpoints drawn at random, in order."""
    found = set()
    while len(found) < count:
        found.add(f"10.{source.randrange(256)}.{source.randrange(256)}.{source.randrange(256)}:8080")
    return sorted(found)


def measure(way: Callable[[Sequence[str]], list[str]], count: int, clusters: int) -> tuple[float, ...]:
    """Return the columns behind the number of endpoints."""
    source = random.Random(count)
    busiest, moved, needless, seconds = 0.0, [], [], 0.0
    for _number in range(clusters):
        endpoints = cluster(source, count)
        started = time.perf_counter()
        before = way(endpoints)
        seconds += time.perf_counter() - started
        slots = Counter(before)
        busiest = max(busiest, max(slots.values()) * count / len(before))
        gone = source.choice(endpoints)
        after = way([text for text in endpoints if text != gone])
        changes = sum(one != other for one, other in zip(before, after))
        moved.append(changes * 100 / len(before))
        needless.append((changes - slots[gone]) * 100 / len(before))
    mean = sum(moved) / clusters
    elements = mean * len(before) / 100
    return busiest, mean, max(moved), sum(needless) / clusters, elements, seconds * 1000 / clusters


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clusters", type=int, default=100, help="clusters drawn for each row")
    clusters = parser.parse_args().clusters
    print("| algorithm | endpoints | busiest | moved, % | worst | needless, % | elements | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, way in WAYS.items():
        for count in COUNTS:
            row = measure(way, count, clusters)
            print("| {} | {} | {:.2f} | {:.1f} | {:.1f} | {:.2f} | {:.0f} | {:.2f} |".format(name, count, *row))


if __name__ == "__main__":
    main()
