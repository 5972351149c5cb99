# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Frame the input of ``iptables-restore``: one transaction (``*TABLE`` to ``COMMIT``) per table, no injected lines.

The lines of a service proxy's tables are written by :func:`tables.restore_text`; ``kernel.xtables.restore`` runs the
program.
"""

from __future__ import annotations

from typing import Iterable

from ...base.errors import ConfigurationError


def one_line(text: str) -> str:
    """Return the text. Raises ConfigurationError if it holds a line break or a NUL, which could inject a line."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise ConfigurationError(f"a rule or chain name holds a line break or NUL: {text[:80]!r}")
    return text


def transaction(table: str, chains: Iterable[str], lines: Iterable[str]) -> str:
    """Return the transaction of one table: chains to be created or flushed (``:CHAIN - [0:0]``), then lines in order.

    Raises ConfigurationError for a table or chain line that :func:`one_line` refuses; ``lines`` have passed it.
    """
    # iptables-nft-restore inserts each chain into a list sorted by name, searching from its start: descending names
    # avoid a search whose cost is quadratic in the number of chains (5,000 Services: two minutes).
    ordered = sorted(map(one_line, chains), reverse=True)
    return "\n".join([f"*{one_line(table)}", *ordered, *lines, "COMMIT\n"])
