# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a node, to compare before and after: ``python3 -m tests.molecule_support.portrait``.

Prints JSON: rules, sets, addresses, devices, routes, units, users and the files of an administrator. It omits what
changes on its own (counters, handles, times), what listing a table creates (empty tables with their built-in
chains), values of the running kernel, and files in /run, which by design last until the next boot.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

PLACES = ("/etc", "/usr/local", "/var/lib/kubenode-proxy", "/root")
PASSING = re.compile(r"/etc/(mtab|\.pwd\.lock|ld\.so\.cache|.*-$)|/root/\.(ansible|cache)|/usr/local/lib/python")


def _output(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    # systemctl waits 25 seconds for a busy systemd by default.
    patient = {**os.environ, "SYSTEMD_BUS_TIMEOUT": "300s"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=patient)
    return done.stdout.splitlines()


def _rules(program: str) -> list[str]:
    """Return user-defined rules and chains, by table."""
    found, table = [], ""
    for line in _output(program):
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith("-A") or (line.startswith(":") and line.split()[1] == "-"):
            found.append(f"{table} {re.sub(r' [[].*', '', line)}")
    return sorted(found)


def _tables() -> list[str]:
    """Return the tables of nftables, without those of iptables-nft."""
    of_iptables = re.compile(r"table ip6? (nat|filter|mangle|raw|security)$")
    return [line for line in _output("nft", "list", "tables") if not of_iptables.match(line)]


def _files() -> dict[str, str]:
    found = {}
    for place in PLACES:
        for directory, _names, files in os.walk(place):
            for path in [directory, *(os.path.join(directory, name) for name in files)]:
                if PASSING.match(path):
                    continue
                status = os.lstat(path)
                text = f"{status.st_mode:o} {status.st_uid}:{status.st_gid}"
                if os.path.islink(path):
                    text += " -> " + os.readlink(path)
                elif os.path.isfile(path):
                    with open(path, "rb") as stream:
                        text += " " + hashlib.sha256(stream.read()).hexdigest()[:16]
                found[path] = text
    return found


def portrait() -> dict[str, object]:
    """Return everything, by section."""
    units = _output("systemctl", "list-unit-files", "--no-legend", "--no-pager", "--plain")
    sets = _output("ipset", "list", "-n") if os.path.exists("/sys/module/ip_set") else []
    wanted = ("--type=service,timer", "--state=active", "--no-legend", "--plain")
    active = _output("systemctl", "list-units", *wanted)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot = stream.read().strip()
    return {
        "boot": boot,
        "iptables": _rules("iptables-save"),
        "ip6tables": _rules("ip6tables-save"),
        "nftables": _tables(),
        "sets": sets,
        "virtual servers": _virtual_servers(),
        "addresses": sorted(
            " ".join(line.split()[1:4]) for line in _output("ip", "-o", "addr") if " fe80::" not in line
        ),
        "rules of routing": _output("ip", "rule"),
        "units": sorted(" ".join(line.split()[:2]) for line in units),
        "running": sorted(
            line.split()[0]
            for line in active
            if not line.startswith(("user@", "user-runtime-dir@", "systemd-", "session-"))
        ),
        "files": _files(),
    }


def _virtual_servers() -> list[str]:
    try:
        with open("/proc/net/ip_vs", encoding="ascii") as stream:
            return stream.read().splitlines()[3:]
    except FileNotFoundError:
        return []


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return one line for each difference."""
    lines = []
    for section, old in before.items():
        new = after[section]
        if isinstance(old, dict) and isinstance(new, dict):
            names = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
            lines += [f"{section}: {name}: {old.get(name)} -> {new.get(name)}" for name in names]
        elif isinstance(old, list) and isinstance(new, list):
            lines += [f"{section}: new: {line}" for line in new if line not in old]
            lines += [f"{section}: gone: {line}" for line in old if line not in new]
        elif old != new:
            lines.append(f"{section}: {old} -> {new}")
    return lines


if __name__ == "__main__":
    sys.stdout.write(json.dumps(portrait()) + "\n")
