# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API server of a scenario: ``python -m tests.molecule_support.control NAMESPACE DIRECTORY``.

It runs in the fabric's network namespace, serves the objects of ``cluster.json`` in the directory, and follows changes
of that file. Once it listens, it writes ``kubeconfig``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Sequence

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab import system
from tests.molecule_support.cluster import API_SERVER


def main(arguments: Sequence[str]) -> int:
    """Serve forever."""
    namespace, directory = arguments[0], Path(arguments[1])
    system.enter(f"/run/netns/{namespace}", system.CLONE_NEWNET)
    source = directory / "cluster.json"
    store = Store(1000)
    token = "molecule-token"
    address, port = API_SERVER
    seen = 0
    certificates = make_certificates(directory / "certificates", addresses=(address,))
    store.replace_all(json.loads(source.read_text(encoding="utf-8"))["items"])
    server = ApiServer(store, certificates, token=token, address=API_SERVER, bookmark_seconds=10)
    url = f"https://{address}:{port}"
    partial = write_kubeconfig(directory / "kubeconfig.partial", url, certificates.authority, token)
    partial.rename(directory / "kubeconfig")
    while True:
        (directory / "requests.json").write_text(json.dumps(server.requests[-1000:]), encoding="utf-8")
        changed = source.stat().st_mtime_ns
        if changed != seen:
            seen = changed
            store.replace_all(json.loads(source.read_text(encoding="utf-8"))["items"])
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
