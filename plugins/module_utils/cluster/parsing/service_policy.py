# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the annotations of Services that request something kube-proxy does not have.

An invalid value is skipped and reported by name; the Service is served nevertheless. A restriction remains one: an
invalid CIDR matches no source.

Annotations of other proxies with the same meaning are aliases. Whether they apply is a setting of the node, so their
invalid values are recorded with them. Sources: kube-router's pkg/controllers/proxy, Cilium's documentation of
kube-proxy replacement.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional

from ...base import ipvs_schedulers
from ...base.addresses import canonical_address, canonical_network
from ...base.durations import parse_duration
from ..fields import Invalid, shown
from ..model import NO_POLICY, ServicePolicy

PREFIX = "kubenode.proxy/"
ALLOWED_SOURCES = f"{PREFIX}allowed-sources"
SCHEDULER = f"{PREFIX}scheduler"
SCHEDULER_FLAGS = f"{PREFIX}scheduler-flags"
PERSISTENCE_NETMASK = f"{PREFIX}persistence-netmask"
SLOW_START = f"{PREFIX}slow-start"
MODE = f"{PREFIX}mode"
REMOVED_ENDPOINTS = f"{PREFIX}removed-endpoints"
KUBE_ROUTER_SCHEDULER = "kube-router.io/service.scheduler"
KUBE_ROUTER_FLAGS = "kube-router.io/service.schedflags"
CILIUM_ALGORITHM = "service.cilium.io/lb-algorithm"
_OWN = (ALLOWED_SOURCES, SCHEDULER, SCHEDULER_FLAGS, PERSISTENCE_NETMASK, SLOW_START, MODE, REMOVED_ENDPOINTS)
_ALIASES = (KUBE_ROUTER_SCHEDULER, KUBE_ROUTER_FLAGS, CILIUM_ALGORITHM)
SERVICE_ANNOTATIONS = (*_OWN, *_ALIASES)
#: The maximum number of CIDRs of one annotation that apply.
MOST_SOURCES = 1000

#: The schedulers of the kernel's own sources, and the choice of nftables and iptables mode. Others, of vendors, are
#: only for the whole node: an annotation must not make the kernel load an arbitrary module whose name begins with
#: ip_vs.
SCHEDULERS = (*ipvs_schedulers.SCHEDULERS, "random")
_CALLED = {"maglev": "mh"}
FLAGS = tuple(name for name, flag in ipvs_schedulers.SCHEDULER_FLAGS.items() if flag.scheduler)
_ALGORITHMS = ("random", "maglev")
#: The one value of MODE: the agent forwards the connections of the Service itself, whatever the node's mode is.
_FORWARDED = "userspace"
_SHORTEST_RISE, _LONGEST_RISE = 5.0, 3600.0
_KEEP, _RESET, _RESET_AFTER = "keep", "reset", "reset-after="
_SHORTEST_WAIT, _LONGEST_WAIT = 1.0, 3600.0
RESET_FORMS = f"{_KEEP}, {_RESET} or {_RESET_AFTER}DURATION, from 1s to 60m"


def parse_service_policy(metadata: Mapping[str, Any], skipped: list[Invalid]) -> ServicePolicy:
    """Return the policy that annotations of a Service request; append invalid values to ``skipped``."""
    given = _given(metadata, _OWN)
    if not given:
        return NO_POLICY
    prefixes = _prefixes(given, skipped)
    return ServicePolicy(
        allowed_sources=_sources(given[ALLOWED_SOURCES], skipped) if ALLOWED_SOURCES in given else None,
        scheduler=_scheduler(given, SCHEDULER, (*SCHEDULERS, *_CALLED), skipped),
        scheduler_flags=_flags(given, SCHEDULER_FLAGS, FLAGS, skipped),
        persistence_v4=prefixes[0],
        persistence_v6=prefixes[1],
        slow_start=_slow_start(given, skipped),
        userspace=_userspace(given, skipped),
        reset_after=_reset_after(given, skipped),
    )


def parse_aliases(metadata: Mapping[str, Any]) -> ServicePolicy:
    """Return the policy that annotations of kube-router and Cilium request; kube-router's scheduler wins."""
    given = _given(metadata, _ALIASES)
    if not given:
        return NO_POLICY
    invalid: list[Invalid] = []
    scheduler = _scheduler(given, KUBE_ROUTER_SCHEDULER, SCHEDULERS, invalid)
    flags = _flags(given, KUBE_ROUTER_FLAGS, tuple(ipvs_schedulers.SCHEDULER_FLAGS), invalid)
    algorithm = _scheduler(given, CILIUM_ALGORITHM, _ALGORITHMS, invalid)
    problems = tuple(f"{item.field}: {item.reason}" for item in invalid)
    return ServicePolicy(scheduler=scheduler or algorithm, scheduler_flags=flags, problems=problems)


def _given(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    annotations = metadata.get("annotations")
    if not isinstance(annotations, dict):
        return {}
    # A null value, as in YAML after a name without a value, counts as given: a restriction remains one.
    return {name: annotations[name] for name in names if name in annotations}


def _field(name: str) -> str:
    return f"metadata.annotations[{name}]"


def _words(raw: object) -> list[str]:
    """Return the elements of a comma-separated list; a value that is not text is one element, and invalid."""
    return [word.strip() for word in raw.split(",") if word.strip()] if isinstance(raw, str) else [""]


def _scheduler(given: Mapping[str, Any], name: str, known: tuple[str, ...], skipped: list[Invalid]) -> str:
    if name not in given:
        return ""
    text = given[name].strip() if isinstance(given[name], str) else ""
    if text not in known:
        reason = f"{shown(given[name])} is not one of {', '.join(known)}; the node's default is used"
        skipped.append(Invalid(_field(name), reason))
        return ""
    return _CALLED.get(text, text)


def _flags(given: Mapping[str, Any], name: str, known: tuple[str, ...], skipped: list[Invalid]) -> tuple[str, ...]:
    words = _words(given[name]) if name in given else []
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None:
        reason = f"{shown(unknown or given[name])} is not one of {', '.join(known)}; it is skipped"
        skipped.append(Invalid(_field(name), reason))
    return tuple(sorted(set(words).intersection(known)))


def _slow_start(given: Mapping[str, Any], skipped: list[Invalid]) -> float:
    if SLOW_START not in given:
        return 0.0
    seconds = parse_duration(given[SLOW_START].strip()) if isinstance(given[SLOW_START], str) else None
    if seconds is not None and _SHORTEST_RISE <= seconds <= _LONGEST_RISE:
        return seconds
    reason = f"{shown(given[SLOW_START])} is not a duration such as 30s or 2m, from 5s to 60m; there is no slow start"
    skipped.append(Invalid(_field(SLOW_START), reason))
    return 0.0


def parse_reset_after(text: str) -> Optional[float]:
    """Return after how many seconds connections to removed endpoints are reset, infinite to keep them.

    None if the text is invalid.
    """
    if text in (_KEEP, _RESET):
        return math.inf if text == _KEEP else 0.0
    seconds = parse_duration(text[len(_RESET_AFTER) :]) if text.startswith(_RESET_AFTER) else None
    return seconds if seconds is not None and _SHORTEST_WAIT <= seconds <= _LONGEST_WAIT else None


def _reset_after(given: Mapping[str, Any], skipped: list[Invalid]) -> Optional[float]:
    if REMOVED_ENDPOINTS not in given:
        return None
    raw = given[REMOVED_ENDPOINTS]
    seconds = parse_reset_after(raw.strip()) if isinstance(raw, str) else None
    if seconds is None:
        reason = f"{shown(raw)} is not {RESET_FORMS}; the node's default is used"
        skipped.append(Invalid(_field(REMOVED_ENDPOINTS), reason))
    return seconds


def _userspace(given: Mapping[str, Any], skipped: list[Invalid]) -> bool:
    if MODE not in given or given[MODE] == _FORWARDED:
        return MODE in given
    skipped.append(Invalid(_field(MODE), f"{shown(given[MODE])} is not {_FORWARDED}; the node's mode is used"))
    return False


def _prefixes(given: Mapping[str, Any], skipped: list[Invalid]) -> tuple[int, int]:
    """Return the prefix lengths for IPv4 and IPv6 in ``24`` or ``24,64``; 0 for one that is not given."""
    if PERSISTENCE_NETMASK not in given:
        return 0, 0
    words = _words(given[PERSISTENCE_NETMASK])
    lengths = [int(word) if word.isascii() and word.isdecimal() and len(word) <= 3 else 0 for word in words]
    if len(words) not in (1, 2) or not 1 <= lengths[0] <= 32 or not 1 <= lengths[-1] <= 128:
        reason = f"{shown(given[PERSISTENCE_NETMASK])} is not a prefix length for IPv4 (1 to 32), which one for IPv6"
        skipped.append(Invalid(_field(PERSISTENCE_NETMASK), f"{reason} (1 to 128) may follow after a comma"))
        return 0, 0
    return lengths[0], lengths[1] if len(lengths) == 2 else 0


def _sources(raw: object, skipped: list[Invalid]) -> tuple[str, ...]:
    """Return the valid CIDRs of a comma-separated list without duplicates; a plain address is accepted as well.

    Those beyond MOST_SOURCES allow no source: each CIDR needs an entry for every address and port of the Service, and
    an ipset, which all Services share, holds 65,536.
    """
    field = _field(ALLOWED_SOURCES)
    chosen: dict[str, None] = {}
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
