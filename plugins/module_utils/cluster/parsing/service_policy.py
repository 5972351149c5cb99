# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the annotations of Services that request something kube-proxy does not have.

A value that is not valid is skipped by name and never costs the Service. A restriction stays one: an invalid CIDR
matches no source.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from ...addresses import canonical_address, canonical_network
from ..fields import Invalid, shown
from ..model import NO_POLICY, ServicePolicy

PREFIX = "kubenode.proxy/"
ALLOWED_SOURCES = f"{PREFIX}allowed-sources"
SERVICE_ANNOTATIONS = (ALLOWED_SOURCES,)
#: CIDRs of one annotation that count.
MOST_SOURCES = 1000


def parse_service_policy(metadata: Mapping[str, Any], skipped: List[Invalid]) -> ServicePolicy:
    """Return the policy that annotations of a Service request; append what is not valid to ``skipped``."""
    annotations = metadata.get("annotations")
    sources = annotations.get(ALLOWED_SOURCES) if isinstance(annotations, dict) else None
    if sources is None:
        return NO_POLICY
    return ServicePolicy(allowed_sources=_sources(sources, skipped))


def _sources(raw: object, skipped: List[Invalid]) -> Tuple[str, ...]:
    """Return the valid CIDRs of a list with commas, each once; a plain address is accepted as well.

    Those beyond MOST_SOURCES allow no source: each CIDR takes an entry for every address and port of the Service, and
    an ipset that all Services share holds 65,536.
    """
    field = f"metadata.annotations[{ALLOWED_SOURCES}]"
    chosen: Dict[str, None] = {}
    parts = raw.split(",") if isinstance(raw, str) else [raw]
    if len(parts) > MOST_SOURCES:
        skipped.append(
            Invalid(field, f"has {len(parts)} entries; those after the first {MOST_SOURCES} allow no source")
        )
    for part in parts[:MOST_SOURCES]:
        text = part.strip() if isinstance(part, str) else ""
        address = canonical_address(text)
        item = canonical_network(text) if address is None else f"{address}/{128 if ':' in address else 32}"
        if item is None:
            skipped.append(Invalid(field, f"{shown(part)} is not a CIDR; it allows no source"))
        else:
            chosen[item] = None
    return tuple(chosen)
