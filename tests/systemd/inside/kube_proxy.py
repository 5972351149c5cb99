#!/usr/bin/python3
# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``kube-proxy``: what another program sees of kube-proxy in iptables mode.

It answers at the ports of healthz and metrics unless they are in use, and writes its chains again every second.
"""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import threading
import time

PORTS = (10256, 10249)
CHAIN = "KUBE-SVC-STANDIN"
RULES = f"""*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:{CHAIN} - [0:0]
-F KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m tcp --dport 80 -j {CHAIN}
-A {CHAIN} -p tcp -j DNAT --to-destination 10.244.7.7:8080
COMMIT
"""


class Healthy(http.server.BaseHTTPRequestHandler):
    """Answers every request."""

    def do_GET(self) -> None:
        """Answer as /healthz does."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Write nothing."""


def main() -> None:
    """Serve until killed."""
    for port in PORTS:
        with contextlib.suppress(OSError):
            server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Healthy)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        subprocess.run(["iptables-restore", "--noflush", "-w"], input=RULES, text=True, check=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
