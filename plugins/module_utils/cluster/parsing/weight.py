# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The weights of endpoints that annotations of EndpointSlices and Nodes set."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from ..fields import Invalid, shown

WEIGHT = "kubenode.proxy/weight"
CILIUM_WEIGHT = "service.cilium.io/weight"
MOST = 256
#: Cilium stores a weight in 16 bits.
CILIUM_MOST = 65535


def parse_weight(annotations: Mapping[str, Any], name: str, skipped: list[Invalid], most: int = MOST) -> Optional[int]:
    """Return the weight in an annotation; None without one, or if it is invalid, which is appended to ``skipped``."""
    if name not in annotations:
        return None
    raw = annotations[name]
    text = raw.strip() if isinstance(raw, str) else ""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most:
        return int(text)
    reason = f"{shown(raw)} is not an integer from 0 to {most}; the default is used"
    skipped.append(Invalid(f"metadata.annotations[{name}]", reason))
    return None
