# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of what later releases of Kubernetes change, what this project does, and the tests that show it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

from .surface import later

TESTS = Path(__file__).resolve().parents[1]
PAGE = Path("docs/kubernetes-1.38.md")
_CASES = ("cases", "cases-extra")
_HEAD = """# Kubernetes 1.37 and 1.38

What these releases change for a service proxy and its users, what this project does, and what shows it. The recordings
to which it is [compared](conformance.md) are of kube-proxy 1.36.2. No kube-proxy of a later release could be run, so
the changes are known by reading. `python -m tests.parity.surface --source TREE`, or `--binary FILE`, prints how the
gates, flags, fields and metrics of another kube-proxy differ.

"Since" names the release, or another version, with its source. Tests are named as pytest takes them; a case is one of
the [wire lab](../tests/conformance/README.md). This page is written by `make docs` from `tests/parity/later.yaml`.
"""
_TAIL = """
## Older clusters

All of this costs nothing in a cluster whose API server is older, which
`tests/unit/cluster/test_api.py::test_an_older_api_server_gets_no_request_for_what_only_later_ones_have` shows with the
tests' own server, made to answer as that of Kubernetes 1.29:

- Managed fields are declined in a header that every request has. An older server answers as ever.
- A collection that it does not have (ServiceCIDRs before 1.33) costs a request for it and one or two for the documents
  that prove it, at the start and [every five minutes](agent.md#the-api-server).
- A field selector that it refuses (`spec.clusterIP` before 1.31) is used once for each server.
- ClusterNetworkPolicies and Nodes are requested only if `networkPolicy` enforces them.

What kube-proxy 1.38 does on the node is done in each cluster, whatever its version: `behaviour` has no other release.
The feature gate `KubeProxyNFTablesLocalhostNodePorts: false` restores what 1.36 did with loopback addresses.
"""


class Fact(NamedTuple):
    """A change, as in ``later.yaml``."""

    since: str
    source: str
    seen: str
    here: str
    tests: Sequence[str]


def _fact(row: Mapping[str, Any], seen: str = "") -> Fact:
    return Fact(row["since"], row["source"], seen or row["seen"], row["here"], row["tests"])


def _named(document: Mapping[str, Any]) -> list[Fact]:
    """Return the facts about gates, metrics and fields."""
    found = []
    for name, rows in document["gates"].items():
        for row in rows:
            stage = row["stage"].lower() or "stable or deprecated"
            found.append(_fact(row, f"feature gate `{name}`: {stage}, {'on' if row['default'] else 'off'}"))
    for name, rows in document["metrics"].items():
        found += [_fact(row, f"{row['type']} `{name}` by {' and '.join(row['labels'])}") for row in rows]
    for name, rows in document["fields"].items():
        found += [_fact(row, f"field `{name}`") for row in rows]
    return found


def facts() -> dict[str, list[Fact]]:
    """Return all facts by topic."""
    document = later()
    found = {topic: [_fact(row) for row in rows] for topic, rows in document["facts"].items()}
    return {**found, "Feature gates, metrics and fields": _named(document)}


def missing(test: str) -> str:
    """Return why a test that a fact names does not exist, or empty text."""
    if test.startswith("case "):
        places = [TESTS / "conformance" / folder / test[len("case ") :] / "case.yaml" for folder in _CASES]
        return "" if any(map(Path.is_file, places)) else "no such case"
    path, _colons, name = test.partition("::")
    file = TESTS.parent / path
    if not file.is_file():
        return "no such file"
    found = re.search(rf"^def {re.escape(name)}\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    return "" if found is not None else "no such test"


def _link(fact: Fact) -> str:
    number = re.fullmatch(r"kubernetes/kubernetes#(\d+)", fact.source)
    if number is not None:
        return f"[{fact.since}](https://github.com/kubernetes/kubernetes/issues/{number[1]})"
    if fact.source.startswith("KEP-"):
        return f"[{fact.since}](https://kep.k8s.io/{fact.source[4:].partition(',')[0].partition(';')[0]})"
    if re.fullmatch(r"kubernetes-sigs/[a-z-]+", fact.source):
        return f"[{fact.since}](https://github.com/{fact.source})"
    return f"{fact.since} ({fact.source})"


def _test(test: str) -> str:
    return f"case `{test[len('case ') :]}`" if test.startswith("case ") else f"`{test}`"


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for topic, rows in facts().items():
        parts.append(f"\n## {topic}\n\n| since | what changes | here | shown by |\n|---|---|---|---|\n")
        for fact in rows:
            cells = (_link(fact), fact.seen, fact.here, ", ".join(map(_test, fact.tests)))
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join([*parts, _TAIL])
