# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of policies, of each one and of all of those that a node needs together."""

from __future__ import annotations

from ..cluster.model import NamespacedName

#: A policy and one of its directions.
PolicySide = tuple[NamespacedName, str]
#: Address ranges, counted once for every rule whose ranges contain them; of one policy, and of all together.
MOST_PIECES = 1_000_000
#: Rules for some peers, with different ports. Each may make a class of peers, for which every selected pod of the node
#: has an entry.
MOST_RULES = 1_000
#: Port ranges of all rules; and the ports that their names resolve to, in all different port layouts of pods.
MOST_PORTS = 100_000
#: Names of ports, counted once for every rule that uses them.
MOST_NAMES = 1_000
#: Pods and namespaces that the selectors of a policy are compared with, counted once for every condition of every
#: selector (see :class:`.Candidates`): each comparison takes a microsecond or two.
MOST_CANDIDATES = 500_000
#: The same for the different selectors of all policies, and for the pods that match them.
MOST_CANDIDATES_TOGETHER = 1_000_000
#: Steps of one update that evaluate what subjects grant to classes of peers, each below a microsecond.
MOST_STEPS = 2_000_000
#: Ranges that are only compared, or rules that are only collected, in one step.
PER_STEP = 8
#: Rules, peers, names and own ports of the subjects of all pods of the node, each a fraction of a kilobyte.
MOST_KEPT = 300_000
#: Entries of the table, as those of Services in ``cluster.account``, that depend on the content of policies; of all
#: policies together.
MOST_ROWS = 250_000


class TooManyRows(Exception):
    """The policies need more rows than allowed; the rows are incomplete."""
