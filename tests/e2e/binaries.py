# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The programs of Kubernetes that the cluster runs, all in one directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tests.lab.system import LabError, run

#: What must be in the directory, and what each is for.
PROGRAMS = {
    "etcd": "the control plane",
    "kube-apiserver": "the control plane",
    "kube-controller-manager": "the control plane",
    "kube-scheduler": "the control plane",
    "kubectl": "the set-up and the suite",
    "kubelet": "the nodes",
    "kube-proxy": "the control run",
    "agnhost": "the pods of the suite",
    "regression-issue-74839": "the pods of the suite",
    "ginkgo": "the suite, several specs at a time",
    "e2e.test": "the suite",
}
#: Those that only the runs of the suite need.
SUITE_PROGRAMS = ("ginkgo", "e2e.test")


class Binaries(NamedTuple):
    """A directory that has :data:`PROGRAMS`, without those of the suite if no run needs them."""

    directory: Path

    def path(self, name: str) -> str:
        """Return the path of a program."""
        return str(self.directory / name)

    def versions(self) -> dict[str, str]:
        """Return the versions of kube-apiserver, kubelet, kube-proxy and etcd."""
        names = ("kube-apiserver", "kubelet", "kube-proxy")
        found = {name: run([self.path(name), "--version"]).split()[-1] for name in names}
        return {**found, "etcd": run([self.path("etcd"), "--version"]).splitlines()[0].split()[-1]}


def find_binaries(directory: str, *, suite: bool = True) -> Binaries:
    """Return the programs in a directory. Raises LabError with one line for each that is missing.

    ``suite``: whether the suite is run.
    """
    if not directory:
        raise LabError("no directory with Kubernetes' programs: make e2e KUBERNETES_BINARIES=DIRECTORY")
    place = Path(directory).resolve()
    if not place.is_dir():
        raise LabError(f"{directory}: no such directory")
    missing = [
        f"{place / name}: {'not executable' if (place / name).exists() else 'missing'}; needed for {purpose}"
        for name, purpose in PROGRAMS.items()
        if (suite or name not in SUITE_PROGRAMS) and not (os.access(place / name, os.X_OK) and (place / name).is_file())
    ]
    if missing:
        raise LabError("\n".join(missing))
    return Binaries(place)
