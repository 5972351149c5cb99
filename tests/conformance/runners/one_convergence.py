# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Converge the node this runs on, as the lab's environment says: the runners ``oneshot`` and ``cleanup``.

The variables are LAB_CONFIG (KubeProxyConfiguration), LAB_SNAPSHOT (objects), LAB_NODE, LAB_MODE, LAB_DIR (state kept
between runs), LAB_NETWORK_POLICY (``1``: enforce network policies; ``standalone``: and serve no Services) and, with it,
LAB_NETWORK_POLICY_ESTABLISHED (``keep`` or ``cut``) and LAB_IPVS_FILTER_BACKEND. The functions called are those of the
module service_proxy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Mapping, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "plugins"))

from module_utils.base.errors import ProxyError
from module_utils.cluster.files.snapshot import read_snapshot
from module_utils.cluster.state import ClusterState
from module_utils.configuration.load import load_file
from module_utils.convergence.request import Request
from module_utils.rollback.converged import converge


def node_document(environment: Mapping[str, str]) -> Optional[dict[str, Any]]:
    """Return the NodeProxyConfiguration that the environment requests; None for that of the file."""
    if "LAB_NETWORK_POLICY" not in environment:
        return None
    wanted = environment["LAB_NETWORK_POLICY"]
    policy: dict[str, Any] = {"enabled": wanted in ("1", "standalone"), "clusterNetworkPolicies": True}
    policy["standalone"] = wanted == "standalone"
    established = environment.get("LAB_NETWORK_POLICY_ESTABLISHED")
    if established:
        policy["establishedConnections"] = established
    return {"networkPolicy": policy, "ipvsFilterBackend": environment.get("LAB_IPVS_FILTER_BACKEND", "auto")}


def main(action: str) -> int:
    """Converge (``oneshot``) or remove everything (``cleanup``); return 0, or 1 with one line on standard error."""
    environment = os.environ
    try:
        configuration, warnings = load_file(environment["LAB_CONFIG"], node_source=node_document(environment))
        present = action == "oneshot"
        cluster = ClusterState.from_objects(read_snapshot(environment["LAB_SNAPSHOT"]) if present else ())
        report = converge(
            Request(
                cluster=cluster,
                configuration=configuration,
                node_name=environment.get("LAB_NODE", ""),
                mode=environment.get("LAB_MODE", ""),
                state="present" if present else "absent",
                state_directory=os.path.join(environment["LAB_DIR"], "kubenode-proxy"),
                # A case has few objects, and its next step may delete all of them.
                whole_cluster=False,
                max_unserved_percent=100.0,
            )
        )
    except KeyError as error:
        print(f"the environment variable {error.args[0]} is not set", file=sys.stderr)
        return 1
    except ProxyError as error:
        print(error, file=sys.stderr)
        return 1
    for line in (*warnings, *report.warnings, *report.refused):
        print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
