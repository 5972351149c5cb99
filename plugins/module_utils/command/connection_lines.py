# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of ``explain --from END --to END``."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

from ..addresses import address_and_port


def connection_lines(document: Dict[str, Any], why_not: bool) -> List[str]:
    """Return an explanation as text. ``why_not``: also why each rule of a pod that is isolated does not match."""
    lines = [f"{document['from']} -> {document['to']}: {'allowed' if document['allowed'] else 'denied'}"]
    lines += [f"  {note}" for note in document["notes"]]
    for item in document["connections"]:
        place = address_and_port(item["destination"], item["port"]) if item["port"] else item["destination"]
        via = f" (Service {item['service']})" if item["service"] else ""
        state = "allowed" if item["allowed"] else "denied"
        lines.append(f"  {item['source']} -> {place}/{item['protocol']}{via}: {state}")
        for side in item["sides"]:
            lines += _side_lines(side, why_not)
        if item["programmed"]:
            lines.append("    programmed:")
            lines += [f"      {line}" for line in item["programmed"]]
    return lines


def _side_lines(side: Dict[str, Any], why_not: bool) -> Iterator[str]:
    of = f" of {side['pod']}" if side["pod"] else ""
    where = "" if side["judgedHere"] or not side["pod"] else f", judged by node {side['node'] or 'not known yet'}"
    yield f"    {side['direction']}{of}: {'allowed' if side['allowed'] else 'denied'}: {side['reason']}{where}"
    if side["isolatedBy"]:
        yield f"      isolated by {', '.join(side['isolatedBy'])}"
    if side["allowedBy"]:
        yield f"      allowed by {side['allowedBy']}"
    if side["deniedBy"]:
        yield f"      denied by {side['deniedBy']}"
    if why_not:
        yield from (f"      {miss}" for miss in side["misses"])
