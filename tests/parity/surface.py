# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of kube-proxy's gates, flags, fields and metrics, and its comparison with a kube-proxy and with the code.

``python -m tests.parity.surface --source TREE`` (or ``--binary FILE``, or both) prints what differs from the table, and
ends with 1 if anything does; with ``--record`` it writes the table instead. The table is ``recorded.json``, from a tree
and a program, with the facts of later releases in ``later.yaml``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import yaml

from .sources import Gate, Metric, Surface, names_in, of_binary, of_tree

HOME = Path(__file__).resolve().parent
RECORDED = HOME / "recorded.json"
#: The module that has the gates of the table for the node, relative to the top of the repository.
GATES_MODULE = Path("plugins/module_utils/configuration/gate_table.py")


def recorded() -> Surface:
    """Return the table of the release that was recorded."""
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    return Surface(
        document["release"],
        {name: Gate(*values) for name, values in document["gates"].items()},
        document["flags"],
        document["fields"],
        {name: Metric(kind, tuple(labels)) for name, (kind, labels) in document["metrics"].items()},
    )


@functools.cache
def later() -> dict[str, Any]:
    """Return the facts about other releases; they must not be changed."""
    document: dict[str, Any] = yaml.safe_load((HOME / "later.yaml").read_text(encoding="utf-8"))
    return document


def number(release: str) -> list[int]:
    """Return a release such as 1.38 as numbers, which can be compared."""
    return [int(part) for part in release.split(".")]


def _reached(facts: Mapping[str, Sequence[Mapping[str, Any]]], release: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the last fact about each name that a release has reached."""
    for name, rows in facts.items():
        known = [row for row in rows if number(row["since"]) <= number(release)]
        if known:
            yield name, known[-1]


def table(release: str) -> Surface:
    """Return the whole table as of a release: what was recorded, with later facts."""
    base, facts = recorded(), later()
    gates = {name: Gate(row["default"], row["stage"]) for name, row in _reached(facts["gates"], release)}
    fields = [name for name, _row in _reached(facts["fields"], release)]
    metrics = {name: Metric(row["type"], tuple(row["labels"])) for name, row in _reached(facts["metrics"], release)}
    return Surface(
        release,
        dict(sorted({**base.gates, **gates}.items())),
        base.flags,
        sorted({*base.fields, *fields}),
        {**(base.metrics or {}), **metrics},
    )


def gates_module(release: str) -> str:
    """Return the text of the module that has the gates of a release."""
    rows = "\n".join(
        f'    "{name}": Gate({gate.default}, {json.dumps(gate.stage)}, {gate.locked}),'
        for name, gate in table(release).gates.items()
    )
    removed = "\n".join(f'    "{name}",' for name in sorted(later()["removed_gates"]))
    return f'''# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The feature gates of kube-proxy {release}, from the table in tests/parity: written by make docs."""

from __future__ import annotations

from typing import Mapping, NamedTuple


class Gate(NamedTuple):
    """A feature gate: its default, its stage as metrics name it, and whether it cannot be changed."""

    default: bool
    stage: str
    locked: bool


GATES: Mapping[str, Gate] = {{
{rows}
}}
REMOVED: tuple[str, ...] = (
{removed}
)
'''


def differences(found: Surface, program: Optional[Path] = None) -> list[str]:
    """Return what differs between a kube-proxy and the table of its release, one line each."""
    expected = table(found.release)
    lines: list[str] = []

    def compare(what: str, wanted: set[str], present: set[str]) -> None:
        lines.extend(f"{what} {name}: not in kube-proxy {found.release}" for name in sorted(wanted - present))
        lines.extend(f"{what} {name}: not in the table" for name in sorted(present - wanted))

    # The help of a program has neither stable gates nor deprecated flags, and gates of other components.
    shown = {name for name, gate in expected.gates.items() if program is None or gate.stage}
    known = set(found.gates) if program is None else set(found.gates) & {*expected.gates, *later()["gates"]}
    compare("gate", shown, known)
    for name in sorted(shown & known):
        ours, theirs = expected.gates[name], found.gates[name]
        if ours != theirs:
            lines.append(f"gate {name}: {theirs} in kube-proxy, {ours} in the table")
    flags = set(found.flags)
    lines += [f"flag --{name}: not in the table" for name in sorted(flags - set(expected.flags))]
    if program is None:
        compare("field", {name for name in expected.fields if not _is_generic(name)}, set(found.fields))
        compare("metric", set(expected.metrics or {}), set(found.metrics or {}))
        for name in sorted({*(expected.metrics or {})} & {*(found.metrics or {})}):
            ours_, theirs_ = (expected.metrics or {})[name], (found.metrics or {})[name]
            if ours_ != theirs_:
                lines.append(f"metric {name}: {theirs_} in kube-proxy, {ours_} in the table")
        return lines
    lines += [f"field {name}: not in the table" for name in found.fields if not _is_covered(name, expected.fields)]
    names = list(expected.metrics or {})
    lines += [f"metric {name}: not in this program" for name in sorted(set(names) - names_in(program, names))]
    return lines


def _is_covered(name: str, known: Sequence[str]) -> bool:
    return any(name == item or name.startswith(f"{item}.") for item in known)


def _is_generic(name: str) -> bool:
    """Return whether a field was only read, in a release of which no tree was at hand."""
    return name in later()["fields"]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Compare a kube-proxy with the table, or record it."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.surface", description=__doc__)
    parser.add_argument("--source", type=Path, metavar="TREE", help="a source tree of Kubernetes")
    parser.add_argument("--binary", type=Path, metavar="FILE", help="the program kube-proxy")
    parser.add_argument("--record", action="store_true", help="write the table; needs a source tree")
    given = parser.parse_args(arguments)
    if given.source is None and (given.binary is None or given.record):
        parser.error("--source TREE or --binary FILE is needed, and --source for --record")
    tree = of_tree(given.source) if given.source else None
    program = of_binary(given.binary) if given.binary else None
    if given.record and tree is not None:
        flags = sorted({*tree.flags, *(program.flags if program else ())})
        document = {**tree._asdict(), "flags": flags}
        RECORDED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    lines = differences(tree) if tree is not None else []
    lines += differences(program, given.binary) if program is not None else []
    print(*(lines or ["nothing differs from the table"]), sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
