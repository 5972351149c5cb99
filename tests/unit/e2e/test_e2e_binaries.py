# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each program of Kubernetes that is missing is named, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.__main__ import FIRST_DAY, chosen_runs, main
from tests.e2e.binaries import PROGRAMS, find_binaries
from tests.lab.system import LabError


def make_programs(directory: Path) -> None:
    for name in PROGRAMS:
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)


def test_a_directory_with_all_programs_is_taken(tmp_path: Path) -> None:
    make_programs(tmp_path)
    assert find_binaries(str(tmp_path)).path("kubelet") == str(tmp_path / "kubelet")


def test_all_missing_programs_are_named_with_their_purpose(tmp_path: Path) -> None:
    make_programs(tmp_path)
    (tmp_path / "etcd").unlink()
    (tmp_path / "ginkgo").chmod(0o644)
    with pytest.raises(LabError) as caught:
        find_binaries(str(tmp_path))
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/etcd: missing; needed for the control plane",
        f"{tmp_path}/ginkgo: not executable; needed for the suite, several specs at a time",
    ]


def test_only_runs_of_the_suite_need_its_programs(tmp_path: Path) -> None:
    make_programs(tmp_path)
    (tmp_path / "e2e.test").unlink()
    assert find_binaries(str(tmp_path), suite=False).path("kubectl") == str(tmp_path / "kubectl")
    with pytest.raises(LabError, match=r"e2e\.test: missing; needed for the suite"):
        find_binaries(str(tmp_path))


def test_no_directory_is_an_error_that_says_what_to_type() -> None:
    with pytest.raises(LabError, match=re.escape("make e2e KUBERNETES_BINARIES=DIRECTORY")):
        find_binaries("")
    with pytest.raises(LabError, match=re.escape("/no/such/place: no such directory")):
        find_binaries("/no/such/place")


def test_the_command_prints_them_and_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--binaries", str(tmp_path), "--output", str(tmp_path / "results")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(PROGRAMS)
    assert all(line.startswith(f"error: {tmp_path}/") for line in lines)


def test_runs_are_those_that_the_kernel_can_do() -> None:
    assert "ipvs" in chosen_runs([], ipvs=True)
    assert "ipvs" not in chosen_runs([], ipvs=False)
    assert "kube-proxy-nftables" in chosen_runs([], ipvs=False)
    assert chosen_runs([], ipvs=False)[-1] == FIRST_DAY == chosen_runs([FIRST_DAY, "nftables"], ipvs=False)[-1]
    assert chosen_runs(["kube-proxy-ipvs"], ipvs=True) == ["kube-proxy-ipvs"]
    with pytest.raises(LabError, match="ipvs: this kernel has no module ip_vs"):
        chosen_runs(["nftables", "kube-proxy-ipvs"], ipvs=False)
