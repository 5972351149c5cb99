# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole cluster, from the images to nodes that are ready for pods."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from tests.systemd.node import remove_left_over

from .binaries import Binaries
from .control_plane import ControlPlane
from .images import image_names, image_of, pod_images
from .nodes import NODES, KubernetesNode


class Cluster:
    """A control plane and nodes that have joined it; a context manager, which removes everything at its end.

    ``scratch`` is an empty directory on a disk, ``logs`` a directory for the output of the control plane. Raises
    LabError, or AssertionError where something does not become ready.
    """

    def __init__(self, binaries: Binaries, scratch: Path, logs: Path) -> None:
        self.binaries = binaries
        self.nodes: list[KubernetesNode] = []
        self._logs = logs
        self._closing = contextlib.ExitStack()
        remove_left_over()
        try:
            self.images = names = image_names(binaries)
            images = scratch / "images" / "pods.tar"
            images.parent.mkdir()
            pod_images(binaries, names, images)
            hosts = [f"knp{os.getpid()}-n{number}" for number in range(1, NODES + 1)]
            self.control = ControlPlane(binaries, scratch / "control", logs, hosts)
            self._closing.callback(self.control.close)
            for number, name in enumerate(hosts, 1):
                place = scratch / f"n{number}"
                place.mkdir()
                node = KubernetesNode(name, number, place, binaries, images)
                self._closing.callback(shutil.rmtree, place, ignore_errors=True)
                self._closing.callback(node.close)
                self.nodes.append(node)
                node.join(self.control, image_of("pause", names))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Save the nodes' journals, then remove nodes and control plane."""
        for node in self.nodes:
            text = node.run("journalctl", "--no-pager", "--no-hostname", check=False).stdout
            (self._logs / f"n{node.number}.journal").write_text(text, encoding="utf-8")
        self.nodes.clear()
        self._closing.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
