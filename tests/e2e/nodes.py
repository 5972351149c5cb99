# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nodes: containers with systemd, Debian's containerd and CNI plugins, and a kubelet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.lab.node import AUTHORIZED_KEYS
from tests.systemd.node import Node
from tests.waiting import wait_for

from .addresses import CONTROL, DNS, DOMAIN, node_addresses, pod_networks
from .binaries import Binaries
from .control_plane import BRIDGE, ControlPlane

PACKAGES = ("containerd", "runc", "containernetworking-plugins", "ethtool", "socat", "openssh-server")
#: Where a node sees Kubernetes' programs and the archive of images.
PROGRAMS, IMAGES = "/opt/kubernetes", "/opt/images"
#: How many nodes a cluster has.
NODES = 2
_CONTAINERD = """\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"""
_UNIT = """\
[Unit]
Description=kubelet
After=containerd.service
Requires=containerd.service
[Service]
ExecStartPre=mount --make-rshared /
ExecStart={programs}/kubelet --config=/etc/kubernetes/kubelet.json --kubeconfig=/etc/kubernetes/kubelet.kubeconfig \\
  --hostname-override=%H --node-ip={addresses}
Restart=always
RestartSec=2
[Install]
WantedBy=multi-user.target
"""
# kubelet sets these, which are the machine's: it finds files with the values that it wants, and writes nothing
# (kubelet, setupKernelTunables). A container that tries to change others of the machine finds them read-only.
_READ_ONLY = ("/proc/sys/kernel", "/proc/sys/vm", "/proc/sys/fs")
_WANTED = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
_SYSCTLS = {
    "net.ipv4.ip_forward": 1,
    "net.ipv6.conf.all.forwarding": 1,
    "net.bridge.bridge-nf-call-iptables": 1,
    "net.bridge.bridge-nf-call-ip6tables": 1,
}


class KubernetesNode(Node):
    """A node of the cluster, from 1 on; its kubelet runs once it has joined."""

    def __init__(self, name: str, number: int, scratch: Path, binaries: Binaries, images: Path) -> None:
        self.number = number
        self._images = images
        self._binaries = binaries
        more = ["--cgroupns=private", f"--volume={binaries.directory}:{PROGRAMS}:ro"]
        more.append(f"--volume={images.parent}:{IMAGES}:ro")
        # Overlays cannot be stacked on the container's own, and kubelet measures the file system of its directory.
        for part in ("containerd", "kubelet"):
            place = scratch / part
            place.mkdir()
            more.append(f"--volume={place}:/var/lib/{part}")
        super().__init__(name, scratch, "none", packages=PACKAGES, project=True, more=more)

    def join(self, control: ControlPlane, pause: str) -> None:
        """Connect the node to the control plane and start its kubelet; pods may be scheduled to it afterwards."""
        self._connect(control)
        self._start_containerd(pause)
        for path in _READ_ONLY:
            self.run("mount", "--bind", path, path)
            self.run("mount", "-o", "remount,bind,ro", path)
        for name, value in _WANTED.items():
            self.write(f"/run/wanted/{name}", f"{value}\n")
            self.run("mount", "--bind", f"/run/wanted/{name}", f"/proc/sys/{name}")
        self.run("mkdir", "--parents", "/etc/kubernetes")
        self.copy(control.kubeconfig(self.name), "/etc/kubernetes/kubelet.kubeconfig")
        self.copy(control.directory / "ca.crt", "/etc/kubernetes/ca.crt")
        self.write("/etc/kubernetes/resolv.conf", f"nameserver {CONTROL[0]}\n")
        self.write("/etc/kubernetes/kubelet.json", json.dumps(self._kubelet()))
        unit = _UNIT.format(programs=PROGRAMS, addresses=",".join(node_addresses(self.number)))
        self.write("/etc/systemd/system/kubelet.service", unit)
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "start", "kubelet.service")
        condition = '{.status.conditions[?(@.type=="Ready")].status}'
        wait_for(
            lambda: control.kubectl("get", "node", self.name, f"--output=jsonpath={condition}") == "True",
            300,
            what=f"{self.name} is ready",
        )

    def register_with_taint(self, key: str) -> None:
        """Start kubelet as that of a new Node, which registers with a taint of this key."""
        taints = [{"key": key, "effect": "NoSchedule"}]
        self.write("/etc/kubernetes/kubelet.json", json.dumps({**self._kubelet(), "registerWithTaints": taints}))
        self.run("systemctl", "start", "kubelet.service")

    def admit(self, keys: Path) -> None:
        """Let the ordinary user ``tests.lab.node.USER``, who has sudo, log in over ssh with these keys."""
        self.copy(keys / "key.pub", AUTHORIZED_KEYS)
        self.copy(keys / "hostkey", "/etc/ssh/hostkey")
        self.run("chmod", "600", "/etc/ssh/hostkey")
        self.write(
            "/etc/ssh/sshd_config.d/test.conf", f"HostKey /etc/ssh/hostkey\nAuthorizedKeysFile {AUTHORIZED_KEYS}\n"
        )
        self.run("systemctl", "restart", "ssh.service")

    def _connect(self, control: ControlPlane) -> None:
        """Connect the node to the bridge beside the control plane, and its pods to those of the other nodes."""
        link = f"node{self.number}"
        create = ["ip", "link", "add", link, "master", BRIDGE, "type", "veth", "peer", "name", "eth0", "netns"]
        control.run(*create, str(self.pid))
        control.run("ip", "link", "set", link, "up")
        for name, value in _SYSCTLS.items():
            self.run("sysctl", "--quiet", "--write", f"{name}={value}")
        own = node_addresses(self.number)
        lines = [f"address add {own[0]}/24 dev eth0", f"address add {own[1]}/64 dev eth0 nodad", "link set eth0 up"]
        lines += [f"route add default via {address}" for address in CONTROL]
        for number in range(1, NODES + 1):
            if number != self.number:
                for network, address in zip(pod_networks(number), node_addresses(number)):
                    lines.append(f"route add {network} via {address}")
        self.run("ip", "-batch", "-", text="\n".join(lines) + "\n")

    def _start_containerd(self, pause: str) -> None:
        networks = [[{"subnet": network}] for network in pod_networks(self.number)]
        bridge: dict[str, Any] = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": networks, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]},
        }
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        self.write("/etc/cni/net.d/10-pods.conflist", json.dumps(network))
        self.write("/etc/containerd/config.toml", _CONTAINERD.format(pause=pause))
        self.run("systemctl", "restart", "containerd.service")
        self.run("ctr", "--namespace", "k8s.io", "images", "import", f"{IMAGES}/{self._images.name}")

    @staticmethod
    def _kubelet() -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [DNS[0]],
            "clusterDomain": DOMAIN,
            "resolvConf": "/etc/kubernetes/resolv.conf",
            "failSwapOn": False,
            "failCgroupV1": False,
            # The disk is the machine's: how full it is must not decide about pods and images.
            "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%"},
            "imageGCHighThresholdPercent": 100,
        }
