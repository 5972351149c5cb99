# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect the iptables that the node uses: the variant (legacy or nf_tables), its version, programs and features.

A node may have both variants installed, and rules of both in the kernel. A service proxy must write where kubelet and
the network plugin write. Kubernetes' images agree on a test for it: kubelet's chains in mangle decide first.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Callable, Iterable, NamedTuple, Optional

from ...base.addresses import IPV4, IPV6
from ...base.errors import KernelError, NotInstalledError
from ...base.progress import Progress, unheeded
from ..facts import kernel_release, read_text
from ..modules.modules import available_modules, present_modules
from ..nftables.features import nat_refused
from ..programs import Completed, find_program, run
from .legacy_tables import TableReader
from .lock import held_message

LEGACY = "legacy"
NFT = "nft"
VARIANTS = (LEGACY, NFT)

_PREFIX = {IPV4: "iptables", IPV6: "ip6tables"}
_VERSION = re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:.*\((legacy|nf_tables)\))?")
_HINT_CHAINS = (":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY ")
_NAT_MODULE = {IPV4: "iptable_nat", IPV6: "ip6table_nat"}
_LISTING_WAIT = 5
#: The kernel's list of legacy tables in this network namespace, by ip or ip6.
_NAMES = "/proc/net/{}_tables_names"
TABLES = ("raw", "mangle", "nat", "filter", "security")

Version = tuple[int, int, int]


class XtablesVariant(NamedTuple):
    """The iptables that a node uses, for one family.

    ``name``: legacy or nft; ``reason``: why, in words; ``version``: of the programs, whose paths are ``main``, ``save``
    and ``restore``.
    """

    family: str
    name: str
    reason: str
    version: Version
    main: str
    save: str
    restore: str

    @property
    def restore_waits(self) -> bool:
        """Return whether the restore program supports ``-w SECONDS``."""
        return self.version >= (1, 6, 2)

    @property
    def random_fully(self) -> bool:
        """Return whether MASQUERADE supports --random-fully."""
        return self.version >= (1, 6, 2)

    @property
    def waits(self) -> bool:
        """Return whether iptables itself supports ``-w SECONDS``."""
        return self.version >= (1, 4, 22)

    def __str__(self) -> str:
        return f"{_PREFIX[self.family]} {'.'.join(map(str, self.version))} ({self.name}: {self.reason})"


def parse_version(text: str) -> Optional[tuple[Version, str]]:
    """Parse ``iptables v1.8.9 (nf_tables)`` as version and variant; versions before 1.8 are legacy."""
    found = _VERSION.search(text)
    if not found:
        return None
    major, minor, patch, variant = found.groups()
    return (int(major), int(minor), int(patch or 0)), NFT if variant == "nf_tables" else LEGACY


class _Programs(NamedTuple):
    version: Version
    main: str
    save: str
    restore: str


class Survey:
    """The iptables programs of this node and the contents of their tables, read once for both families.

    Starting programs is slow on a small node, so each version and each save is queried only once.
    """

    def __init__(self) -> None:
        self._versions: dict[str, Optional[tuple[Version, str]]] = {}
        self._found: dict[str, tuple[dict[str, _Programs], str]] = {}
        self._saves: dict[tuple[str, str], str] = {}

    def _version(self, main: str) -> Optional[tuple[Version, str]]:
        # The names of both families are usually links to one file, which reports the same version under each.
        file = os.path.realpath(main)
        if file not in self._versions:
            self._versions[file] = parse_version(run([main, "--version"], timeout=20).output)
        return self._versions[file]

    def installed(self, family: str) -> tuple[dict[str, _Programs], str]:
        """Return the programs of each variant, and the variant of the plain name (empty if there is none)."""
        if family not in self._found:
            self._found[family] = self._look(family)
        return self._found[family]

    def _look(self, family: str) -> tuple[dict[str, _Programs], str]:
        prefix = _PREFIX[family]
        found: dict[str, _Programs] = {}
        default = ""
        # Alternatives can make the plain names another variant at any time, while rules stay where they are.
        for name in (f"{prefix}-{LEGACY}", f"{prefix}-{NFT}", prefix):
            main = find_program(name)
            save, restore = find_program(f"{name}-save"), find_program(f"{name}-restore")
            if not main:
                continue
            version = self._version(main)
            if version is None:
                if name == prefix:
                    return {}, ""  # the plain command is disabled on purpose, so the family is
                continue
            if name == prefix:
                default = version[1]
            if save and restore:
                found.setdefault(version[1], _Programs(version[0], main, save, restore))
        return found, default

    def saved(self, variant: str, table: str = "") -> str:
        """Return the rules of both families in one variant, of one table or all, without creating a table."""
        return "".join(self._saved(family, variant, table) for family in _PREFIX)

    def _saved(self, family: str, variant: str, table: str) -> str:
        programs = self.installed(family)[0].get(variant)
        if programs is None:
            return ""
        if variant == LEGACY:
            # Requesting a table by name would create it, and without any table there is nothing to request.
            tables = table_names(family)
            if not tables or (table and table not in tables):
                return ""
        key = (programs.save, table)
        if key not in self._saves:
            done = run([programs.save, "-t", table], timeout=60) if table else run_save(programs.save, variant, family)
            self._saves[key] = done.output
        return self._saves[key]


def table_names(family: str) -> list[str]:
    """Return the tables that legacy iptables has created in this network namespace.

    The kernel lists them in a file of mode 0440, root's and its group's. Without access to it, each table whose module
    is loaded is queried for its size, which needs CAP_NET_ADMIN and CAP_NET_RAW; since Linux 5.15 that creates an empty
    table if the module is loaded and the table has not been used in this network namespace.
    """
    prefix = "ip6" if family == IPV6 else "ip"
    try:
        with open(_NAMES.format(prefix), encoding="ascii") as file:
            return file.read().split()
    except PermissionError:
        return _asked_table_names(family, prefix)
    except OSError:
        return []


def run_save(program: str, variant: str, family: str, progress: Progress = unheeded) -> Completed:
    """Run an iptables-save program for all tables that exist and return its result, without creating a table.

    iptables-legacy-save reads the names of the tables from the same file as :func:`table_names`, and fails without
    access to it; then it is run for one table at a time. Raises KernelError.
    """
    names = _NAMES.format("ip6" if family == IPV6 else "ip")
    if variant != LEGACY or not os.path.exists(names) or os.access(names, os.R_OK):
        return run([program], progress=progress)
    done = Completed(0, "", "")
    for table in table_names(family):
        one = run([program, "-t", table], progress=progress)
        done = Completed(done.status or one.status, done.output + one.output, done.errors + one.errors, one.process)
    return done


def _asked_table_names(family: str, prefix: str) -> list[str]:
    modules = {f"{prefix}table_{table}": table for table in TABLES}
    # A kernel without modules has its tables built in, and a query cannot load anything.
    present = present_modules(modules, kernel_release()) if os.path.exists("/proc/modules") else set(modules)
    try:
        with contextlib.closing(TableReader(family)) as reader:
            return [table for module, table in modules.items() if module in present and reader.info(table)]
    except KernelError:
        return []


def _hinted(saved: str) -> str:
    """Return kubelet's chain in the table mangle of a save, or an empty text."""
    chains = [line for line in _table_lines(saved, "mangle") if line.startswith(_HINT_CHAINS)]
    return chains[0].split()[0][1:] if chains else ""


def chosen_by_kubelet(saved: Callable[[str, str], str]) -> tuple[str, str]:
    """Return the variant to which kubelet writes, nft if both, with the chain that shows it; two empty texts if none.

    ``saved``: as for :func:`choose`.
    """
    found = ((variant, _hinted(saved(variant, "mangle"))) for variant in (NFT, LEGACY))
    return next((each for each in found if each[1]), ("", ""))


def choose(variants: Iterable[str], saved: Callable[[str, str], str], default: str) -> tuple[str, str]:
    """Return the variant to use out of those installed, and why.

    ``saved`` returns the iptables-save text of a variant, of both families, for one table or (empty) for all. kubelet's
    chains in mangle decide (nft is checked first); else the variant with more rules; else the ``default``. Raises
    KernelError if no variant is installed.
    """
    known = list(variants)
    if not known:
        raise KernelError("iptables: neither the legacy nor the nf_tables variant is installed")
    if len(known) == 1:
        return known[0], "the only variant installed"
    variant, chain = chosen_by_kubelet(saved)
    if variant:
        return variant, f"kubelet's chain {chain} is in mangle"
    counts = {
        variant: sum(line.startswith("-A ") for line in saved(variant, "").splitlines()) for variant in (LEGACY, NFT)
    }
    if counts[LEGACY] != counts[NFT]:
        variant = max(counts, key=lambda name: counts[name])
        return variant, f"it holds {counts[variant]} rules, the other variant {min(counts.values())}"
    return default or NFT, "the variant of the plain iptables command"


def _table_lines(text: str, table: str) -> list[str]:
    lines: list[str] = []
    current = ""
    for line in text.splitlines():
        if line.startswith("*"):
            current = line[1:].strip()
        elif current == table:
            lines.append(line)
    return lines


def detect_variant(family: str, wanted: str = "", survey: Optional[Survey] = None) -> XtablesVariant:
    """Return the iptables to use for a family; ``wanted`` (legacy or nft) overrides the detection.

    Both families' rules count, since a node uses one variant for both. A ``survey`` shared by several calls avoids
    reading them again. Raises NotInstalledError if iptables is not installed, and KernelError if it cannot be run.
    """
    survey = survey or Survey()
    installed, default = survey.installed(family)
    prefix = _PREFIX[family]
    if not installed:
        raise NotInstalledError(f"{prefix}: not installed (needed: {prefix}, {prefix}-save and {prefix}-restore)")
    if wanted:
        if wanted not in installed:
            raise NotInstalledError(f"{prefix}: the {wanted} variant is not installed")
        name, reason = wanted, "requested"
    elif len(installed) == 1:
        name, reason = next(iter(installed)), "the only variant installed"
    else:
        name, reason = choose(installed, survey.saved, default)
        refused = nat_refused(family) if name == NFT else ""
        if refused:
            name, reason = LEGACY, refused
    return XtablesVariant(family, name, reason, *installed[name])


def unsupported_reason(family: str, variant: Optional[XtablesVariant]) -> str:
    """Return why the node cannot do NAT with iptables for the family, in words; empty if it can.

    ``variant`` is None if iptables for the family is not installed. Creates no table and loads no module. Raises
    KernelError if another program holds the xtables lock all the time.
    """
    if variant is None:
        return f"{_PREFIX[family]} is not installed"
    if family == IPV6:
        disabled = read_text("/proc/sys/net/ipv6/conf/all/disable_ipv6")
        if disabled is None or not os.path.exists("/proc/net/if_inet6"):
            return "the kernel has no IPv6"
        if disabled.strip() == "1":
            return "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 is 1)"
    command = _listing_command(variant)
    if not command:
        return ""
    done = run(command)
    if done.status and "unshare failed" in done.errors:
        # Without the privilege to create a namespace, as in the agent's sandbox, the command runs in this one.
        done = run(command[command.index(variant.main) :])
    if done.status == 4 and "xtables lock" in done.errors:
        raise KernelError(f"{_PREFIX[family]}: {held_message(_LISTING_WAIT)}")
    if done.status:
        return (
            f"{_PREFIX[family]} has no nat table: {' '.join(done.errors.split()) or 'exit status ' + str(done.status)}"
        )
    return ""


def _listing_command(variant: XtablesVariant) -> list[str]:
    """Return the command that succeeds if the kernel supports NAT; empty if it need not be run.

    Listing a table with legacy iptables creates the table. So if it does not exist yet, its module decides, if that is
    known to be installed, or else the command runs in another network namespace.
    """
    wait = ["-w", str(_LISTING_WAIT)] if variant.waits else []
    command = [variant.main, *wait, "-S", "POSTROUTING", "-t", "nat"]
    if variant.name != LEGACY or "nat" in table_names(variant.family):
        return command
    release = kernel_release()
    if _NAT_MODULE[variant.family] in available_modules(release):
        return []
    elsewhere = find_program("unshare")
    return [elsewhere, "-n", *command] if elsewhere else command
