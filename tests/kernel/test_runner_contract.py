# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract of a runner in tests/conformance/README.md: what it is given, its start, its end, and its log."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conformance.wirelab.arguments import HOME, LAUNCHER

CASE = "clusterip-basic"
DAEMON = f"""#!/bin/sh
set -eu
echo "started for $1"
env | grep '^LAB_' >"$KEPT/environment"
cp "$LAB_CONFIG" "$LAB_KUBECONFIG" "$LAB_SNAPSHOT" "$KEPT/"
{HOME}/runners/agent &
trap 'echo "ended by SIGTERM"; kill -TERM $!; wait $!; exit 0' TERM
wait $!
"""
# Serves the Services on other ports.
OTHER = f"""#!/bin/sh
set -eu
sed 's/"port": 80,/"port": 81,/' "$LAB_SNAPSHOT" >"$LAB_DIR/other.json"
LAB_SNAPSHOT=$LAB_DIR/other.json exec {HOME}/runners/oneshot
"""
BROKEN = "#!/bin/sh\necho no such mode >&2\nexit 3\n"


def run_lab(folder: Path, runner: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = folder / "runner"
    program.write_text(runner, encoding="utf-8")
    program.chmod(0o755)
    words = [str(LAUNCHER), "run", "--mode", "nftables", "--cases", CASE, "--instance", f"c{os.getpid()}-", "--json"]
    words += ["--runner", f"{program} {{case}}", "--save", str(folder / "saved"), "--keep-logs", str(folder), *options]
    environment = {**os.environ, "KEPT": str(folder)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_a_daemon_is_given_the_cluster_and_its_configuration_and_is_ended(tmp_path):
    done = run_lab(tmp_path, DAEMON)
    assert done.returncode == 0, done.stdout + done.stderr
    given = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text(encoding="utf-8").splitlines())
    assert {given["LAB_NODE"], given["LAB_MODE"], given["LAB_CASE"]} == {"node1", "nftables", CASE}
    assert all(given[name].startswith(given["LAB_DIR"]) for name in ("LAB_CONFIG", "LAB_KUBECONFIG", "LAB_SNAPSHOT"))
    configuration = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert configuration["apiVersion"] == "kubeproxy.config.k8s.io/v1alpha1" and configuration["mode"] == "nftables"
    kubeconfig = yaml.safe_load((tmp_path / "kubeconfig").read_text(encoding="utf-8"))
    assert kubeconfig["clusters"][0]["cluster"]["server"].endswith("://127.0.0.1:6443")
    items = json.loads((tmp_path / "snapshot.json").read_text(encoding="utf-8"))["items"]
    assert {item["kind"] for item in items} == {"Node", "ServiceCIDR", "Service", "EndpointSlice"}
    log = (tmp_path / f"{CASE}-nftables.log").read_text(encoding="utf-8").splitlines()
    assert log[0] == f"started for {CASE}" and "ended by SIGTERM" in log
    assert not Path(given["LAB_DIR"]).exists()
    assert json.loads((tmp_path / "saved" / "report.json").read_text(encoding="utf-8"))["wholeCases"] == 1


def test_a_runner_that_does_otherwise_fails_with_the_flows(tmp_path):
    done = run_lab(tmp_path, OTHER, "--oneshot")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["cases"]
    assert row["error"] is None and 0 < row["equal"] < row["total"]
    assert "tcp pod2 -> 10.96.1.1:80" in [found["flow"] for found in row["differences"]]


def test_a_runner_that_ends_fails_with_its_exit_status_and_last_line(tmp_path):
    done = run_lab(tmp_path, BROKEN)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["cases"]
    assert row["error"] == "the proxy exited with 3" and "no such mode" in done.stderr


@pytest.mark.skipif("KUBE_PROXY" not in os.environ, reason="KUBE_PROXY names no program")
def test_the_example_for_kube_proxy_works_as_printed(tmp_path):
    page = (HOME / "README.md").read_text(encoding="utf-8")
    printed = page[page.index("    export LAB_KUBE_PROXY=") :].partition("\n\n")[0]
    command = printed.replace("/path/to/kube-proxy", os.environ["KUBE_PROXY"])
    command = f"{command} --cases {CASE} --instance k{os.getpid()}-"
    done = subprocess.run(["sh", "-ec", command], cwd=HOME.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1/1 cases" in done.stdout, done.stdout + done.stderr
