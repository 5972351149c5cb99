# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check that the Services fit into the ipsets, which refuse more than 65,536 elements."""

from __future__ import annotations

from typing import Hashable, Iterable

from .findings import ERROR, SET_LIMIT, Finding

ELEMENTS_LIMIT = 65536

SetContribution = tuple[str, Iterable[tuple[str, Hashable]]]
"""The name of a Service port (``shop/cart:http``) and the (set, element) pairs that it needs."""


def set_limit_findings(contributions: Iterable[SetContribution], limit: int = ELEMENTS_LIMIT) -> list[Finding]:
    """Return one error per set that would exceed ``limit`` elements; it names the first Service that does not fit.

    Elements that several Services need count once. The order of ``contributions`` decides which Service is first.
    """
    elements: dict[str, set[Hashable]] = {}
    first_too_many: dict[str, str] = {}
    for service, needed in contributions:
        for name, element in needed:
            known = elements.setdefault(name, set())
            known.add(element)
            if len(known) > limit:
                first_too_many.setdefault(name, service)
    return [
        Finding(
            SET_LIMIT,
            ERROR,
            f"ipset {name} holds at most {limit} elements, {len(elements[name])} are needed;"
            f" Service {service} is the first that no longer fits",
            "use ipvsFilterBackend nftables, or mode nftables or iptables, without such a limit,"
            " or exclude Services by label",
        )
        for name, service in first_too_many.items()
    ]
