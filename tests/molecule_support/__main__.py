# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands of Molecule's playbooks: ``python -m tests.molecule_support COMMAND SCENARIO ...``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional, Sequence

from tests.lab.system import LabError
from tests.molecule_support.scenario import Platform, Scenario


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Create or remove a scenario."""
    parser = argparse.ArgumentParser(prog="python -m tests.molecule_support", description="nodes for Molecule")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the nodes")
    up.add_argument("scenario")
    up.add_argument("--platforms", required=True, help="the platforms of molecule.yml, as JSON")
    up.add_argument("--instances", type=Path, required=True, help="file for Molecule's instance configuration")
    down = commands.add_parser("down", help="remove everything")
    down.add_argument("scenario")
    traffic = commands.add_parser("traffic", help="send requests that do not stop")
    traffic.add_argument("scenario")
    traffic.add_argument("action", choices=("start", "stop"))
    watch = commands.add_parser("watch", help="drop and count what nodes send to others than the controller")
    watch.add_argument("scenario")
    unexpected = commands.add_parser("unexpected", help="note how much that was")
    unexpected.add_argument("scenario")
    test = commands.add_parser("test", help="run all of Molecule's steps for scenarios, one after the other")
    test.add_argument("scenarios", nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "test":
        return test_scenarios(options.scenarios)
    scenario = Scenario(options.scenario)
    try:
        if options.command == "down":
            scenario.down()
            return 0
        if options.command == "traffic":
            (scenario.start_traffic if options.action == "start" else scenario.stop_traffic)()
            return 0
        if options.command == "watch":
            scenario.watch()
            return 0
        if options.command == "unexpected":
            counts = " ".join(map(str, scenario.unexpected()))
            (scenario.directory / "unexpected").write_text(counts + "\n", encoding="ascii")
            return 0
        listed = json.loads(options.platforms)
        scenario.up([Platform(entry["name"], entry.get("kind", "container")) for entry in listed])
        options.instances.write_text(json.dumps(scenario.instances(), indent=1) + "\n", encoding="utf-8")
    except (LabError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def test_scenarios(names: Sequence[str]) -> int:
    """Run ``molecule test`` for each scenario, also after a failure, and remove its nodes; return 1 if one failed."""
    failed = []
    for name in names:
        print(f"== molecule {name}", flush=True)
        start = time.monotonic()
        try:
            argv = ["molecule", "test", "--no-command-borders", "--scenario-name", name]
            if subprocess.run(argv, check=False).returncode:
                failed.append(name)
        finally:
            Scenario(name).down()
        print(f"== molecule {name} took {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        sys.stderr.write(f"error: failed: {' '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
