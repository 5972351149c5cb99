# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services: refusals by file, object and field; their precedence over the cluster; and following files."""

from __future__ import annotations

import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files import static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import StaticDirectory, parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.cluster.static_objects import NAME, altered, endpoint_slice, refused, service

CONTEXT = NodeContext("IPv4", "node-1")
MANIFEST = """
apiVersion: v1
kind: Service
metadata: {name: apiserver}
spec:
  clusterIP: 10.103.97.2
  ports: [{name: https, port: 6443}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: apiserver-1, labels: {kubernetes.io/service-name: apiserver}}
addressType: IPv4
ports: [{name: https, port: 6443}]
endpoints: [{addresses: [192.0.2.11]}, {addresses: [192.0.2.12]}]
"""


def served(state):
    """Return the endpoints by address and port, and by Service."""
    return {
        f"{port.cluster_ip}:{port.port} {key.service}": [endpoint.ip for endpoint in port.cluster]
        for key, port in all_service_ports(state, CONTEXT).items()
    }


def test_manifests_of_a_directory_are_served(tmp_path):
    (tmp_path / "apiserver.yaml").write_text(MANIFEST)
    (tmp_path / "other.json").write_text(json.dumps({"kind": "List", "items": [service("other", "10.103.97.3")]}))
    (tmp_path / "README.md").write_text("not a manifest")
    (tmp_path / ".apiserver.yaml.swp").write_text("\0")
    state = ClusterState()
    affected = state.set_static(StaticDirectory(str(tmp_path)).read())
    assert affected == {NAME, NamespacedName("static", "other")}
    assert served(state) == {
        "10.103.97.2:6443 static/apiserver": ["192.0.2.11", "192.0.2.12"],
        "10.103.97.3:6443 static/other": [],
    }
    assert state.refusals == () and state.kinds == set()
    assert state.services[NAME].static == str(tmp_path / "apiserver.yaml")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_file_is_read_again_as_soon_as_it_can_be(tmp_path, monkeypatch, number):
    (tmp_path / "apiserver.yaml").write_text(MANIFEST)
    directory, read = StaticDirectory(str(tmp_path)), static.read_with_own_links

    def refuse(path, _most):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(static, "read_with_own_links", refuse)
    assert list(map(str, directory.read().refusals)) == [f"file {tmp_path / 'apiserver.yaml'}: {os.strerror(number)}"]
    assert not directory.changed()
    monkeypatch.setattr(static, "read_with_own_links", read)
    assert directory.changed()
    assert not directory.read().refusals and not directory.changed()


def test_a_changed_mode_is_a_change(tmp_path):
    """A file may have become readable for the agent's user."""
    (tmp_path / "apiserver.yaml").write_text(MANIFEST)
    directory = StaticDirectory(str(tmp_path))
    directory.read()
    assert not directory.changed()
    (tmp_path / "apiserver.yaml").chmod(0o640)
    assert directory.changed()


@pytest.mark.parametrize(
    ("objects", "lines"),
    [
        ([{"kind": "Pod", "metadata": {"name": "p"}}], ["f.yaml: Pod static/p: kind: is not Service or EndpointSlice"]),
        (
            [{"metadata": {"name": "p"}}],
            ["f.yaml: object static/p: kind: is missing; it must be Service or EndpointSlice"],
        ),
        ([7], ["f.yaml: object (without a name): 7 is not an object"]),
        (
            [{"apiVersion": "v1", "kind": "Service", "spec": {}}],
            ["f.yaml: Service static/(without a name): metadata.name: is missing"],
        ),
        (
            [service(ip="None")],
            ["f.yaml: Service static/apiserver: spec.clusterIP: a headless Service has no address to be served at"],
        ),
        (
            [{**service(), "spec": {"clusterIP": "10.103.97.2"}}],
            ["f.yaml: Service static/apiserver: spec.ports: is missing; without ports nothing is served"],
        ),
        (
            [service(annotations={"kubenode.proxy/check": "tcp", "kubenode.proxy/check-intervall": "2s"})],
            [
                "f.yaml: Service static/apiserver: metadata.annotations[kubenode.proxy/check-intervall]: is unknown",
            ],
        ),
        (
            [service(annotations={"kubenode.proxy/shceduler": "rr"}, labels={"kubenode.proxy/outside-host": "true"})],
            [
                "f.yaml: Service static/apiserver: metadata.labels[kubenode.proxy/outside-host]: is unknown",
                "f.yaml: Service static/apiserver: metadata.annotations[kubenode.proxy/shceduler]: is unknown",
            ],
        ),
        (
            [altered(service(), "spec.selector", {"app": "x"})],
            [
                "f.yaml: Service static/apiserver: spec.selector: selects no pods; EndpointSlices name the endpoints "
                "of a static Service"
            ],
        ),
        (
            [service(), altered(endpoint_slice(), "metadata.annotations", {"kubenode.proxy/wieght": "3"})],
            ["f.yaml: EndpointSlice static/apiserver-1: metadata.annotations[kubenode.proxy/wieght]: is unknown"],
        ),
        (
            [service(), {**endpoint_slice(), "apiVersion": "discovery.k8s.io/v1beta1", "topology": {}}],
            [
                'f.yaml: EndpointSlice static/apiserver-1: apiVersion: "discovery.k8s.io/v1beta1" is not '
                "discovery.k8s.io/v1"
            ],
        ),
        (
            [service(annotations={"kubenode.proxy/check-path": "/readyz"})],
            [
                "f.yaml: Service static/apiserver: metadata.annotations[kubenode.proxy/check-path]: has no effect "
                "without the annotation kubenode.proxy/check"
            ],
        ),
        (
            [service(), {**endpoint_slice(), "ports": [{"name": "https", "port": 6443}]}],
            [
                "f.yaml: EndpointSlice static/apiserver-1: ports: none has the name and protocol of a port of Service "
                'static/apiserver: "" (TCP)'
            ],
        ),
        (
            [service(), {**endpoint_slice(), "addressType": "FQDN"}],
            [
                "f.yaml: EndpointSlice static/apiserver-1: addressType: endpoints must have addresses of type IPv4 or "
                "IPv6"
            ],
        ),
        (
            [service(), {**endpoint_slice(), "endpoints": [{"addresses": ["192.0.2.11"]}, {"hostname": "api-2"}]}],
            ["f.yaml: EndpointSlice static/apiserver-1: endpoints[1].addresses: is missing"],
        ),
        (
            [{**service(), "apiVersion": "serving.knative.dev/v1"}],
            [
                'f.yaml: Service static/apiserver: apiVersion: "serving.knative.dev/v1" is not that of a Service of '
                "Kubernetes"
            ],
        ),
        (
            [service(ip="10.0.0.300")],
            ['f.yaml: Service static/apiserver: spec.clusterIP: "10.0.0.300" is not an IP address'],
        ),
        (
            [service(ip="")],
            ["f.yaml: Service static/apiserver: spec.clusterIP: is missing; there is no API server to assign one"],
        ),
        (
            [endpoint_slice()],
            ["f.yaml: EndpointSlice static/apiserver-1: metadata.labels: there is no static Service static/apiserver"],
        ),
        (
            [service(), service(ip="10.103.97.3")],
            ["f.yaml: Service static/apiserver: metadata.name: is already that of another Service, in f.yaml"],
        ),
        (
            [service(), endpoint_slice(address="127.0.0.1")],
            ["f.yaml: EndpointSlice static/apiserver-1: endpoints[0].addresses[0]: 127.0.0.1 is a loopback address"],
        ),
    ],
)
def test_invalid_manifests_are_refused_by_file_object_and_field(objects, lines):
    assert refused(*objects) == lines
    # Another object of the same file is not affected.
    good = service("good", "10.103.97.9")
    assert NamespacedName("static", "good") in parse_static({"f.yaml": [*objects, good]}).services


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"{", "the JSON is truncated: Expecting property name enclosed in double quotes at line 1 column 2"),
        (b"a: [", "neither JSON nor valid YAML: "),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (b"x" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_parsed_does_not_affect_the_others(tmp_path, content, reason):
    (tmp_path / "a.yaml").write_bytes(content)
    (tmp_path / "b.yaml").write_text(MANIFEST)
    found = StaticDirectory(str(tmp_path)).read()
    (line,) = map(str, found.refusals)
    assert line.startswith(f"file {tmp_path}/a.yaml: {reason}")
    assert list(found.services) == [NAME]


def test_files_that_are_not_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    (tmp_path / "z.yaml").write_text(MANIFEST)
    found = StaticDirectory(str(tmp_path)).read()
    assert [refusal.name.rpartition("/")[2] for refusal in found.refusals] == [
        "dangling.yaml",
        "directory.yaml",
        "fifo.yaml",
    ]
    assert list(found.services) == [NAME]


def test_a_broken_file_keeps_its_objects_until_it_is_removed(tmp_path):
    path = tmp_path / "apiserver.yaml"
    path.write_text(MANIFEST)
    directory = StaticDirectory(str(tmp_path))
    assert directory.changed()
    directory.read()
    assert not directory.changed()
    path.write_text(MANIFEST[:-20])
    assert directory.changed()
    found = directory.read()
    assert list(found.services) == [NAME]
    assert str(found.refusals[0]).endswith("; its last valid content stays in effect")
    path.unlink()
    assert directory.changed() and directory.read().services == {}


def test_given_objects_replace_a_file(tmp_path):
    (tmp_path / "ansible.json").write_text(MANIFEST)
    (tmp_path / "other.yaml").write_text(json.dumps(service("other", "10.103.97.3")))
    found = StaticDirectory(str(tmp_path), {"ansible.json": [service("new", "10.103.97.4")]}).read()
    assert sorted(name.name for name in found.services) == ["new", "other"]
    assert StaticDirectory(str(tmp_path / "absent")).read() == parse_static({})


def test_a_static_service_keeps_its_address_against_any_claim_of_the_cluster():
    state = ClusterState()
    old = "2020-01-01T00:00:00Z"
    for name, ip in (("thief", "10.103.97.2"), ("other", "10.96.0.7")):
        raw = service(name, ip, "tenant", creationTimestamp=old)
        raw["spec"]["externalIPs"] = ["10.103.97.2"]
        state.upsert(raw)
    affected = state.set_static(parse_static({"f.yaml": [service(), endpoint_slice()]}))
    assert affected == {NAME, NamespacedName("tenant", "thief")}
    assert served(state) == {"10.103.97.2:6443 static/apiserver": ["192.0.2.11"], "10.96.0.7:6443 tenant/other": []}
    assert {str(conflict) for conflict in state.conflicts} == {
        f"10.103.97.2:6443/TCP is claimed by static Service static/apiserver (cluster IP) and Service tenant/{name} "
        f"({kind}); static/apiserver gets it"
        for name, kind in (("thief", "cluster IP"), ("other", "external IP"))
    }
    assert state.set_static(parse_static({})) == {NAME, NamespacedName("tenant", "thief")}
    assert list(served(state)) == ["10.96.0.7:6443 tenant/other", "10.103.97.2:6443 tenant/thief"]
    # The older claim of a cluster IP wins over that of an external IP again.
    assert [str(conflict.winner) for conflict in state.conflicts] == ["tenant/thief"]


def test_the_cluster_cannot_add_endpoints_to_a_static_service_by_its_name():
    state = ClusterState()
    state.set_static(parse_static({"f.yaml": [service(), endpoint_slice()]}))
    assert state.upsert(service(ip="10.96.0.9")) == frozenset()
    assert state.upsert(endpoint_slice(address="203.0.113.66", name="extra")) == frozenset()
    assert state.upsert(endpoint_slice(address="203.0.113.66")) == frozenset()
    assert served(state) == {"10.103.97.2:6443 static/apiserver": ["192.0.2.11"]}
    assert list(map(str, state.refusals)) == [
        "Service static/apiserver: metadata.name: is that of a static Service of f.yaml"
    ]


STEP = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(["a", "b"]), st.integers(1, 3)),
    st.tuples(st.just("put slice"), st.sampled_from(["a", "b"]), st.integers(1, 3)),
    st.tuples(st.just("delete"), st.sampled_from(["a", "b"]), st.just(0)),
    st.tuples(st.just("delete slice"), st.sampled_from(["a", "b"]), st.just(0)),
    st.tuples(st.just("static"), st.sampled_from(["", "a", "b", "ab"]), st.integers(1, 3)),
)


@settings(max_examples=300)
@given(st.lists(STEP, max_size=12))
def test_the_result_does_not_depend_on_the_order_of_changes(steps):
    """The state equals a fresh one of the same objects, and every changed Service was reported as affected."""
    state, objects, static = ClusterState(), {}, parse_static({})
    for action, name, number in steps:
        before = {key: (state.services.get(key), dict(state.slices_of(key))) for key in _names()}
        if action == "static":
            static = parse_static(
                {
                    "f.yaml": [
                        item
                        for each in name
                        for item in (service(each, f"10.0.0.{number}"), endpoint_slice(each, f"192.0.2.{number}"))
                    ]
                }
            )
            affected = state.set_static(static)
        else:
            make = endpoint_slice if action.endswith("slice") else service
            raw = make(name, f"10.0.0.{number or 1}")
            key = (action.partition(" ")[2], name)
            if action.startswith("put"):
                objects[key] = raw
                affected = state.upsert(raw)
            else:
                objects.pop(key, None)
                affected = state.delete(raw)
        after = {key: (state.services.get(key), dict(state.slices_of(key))) for key in _names()}
        assert {key for key in _names() if before[key] != after[key]} <= affected
    fresh = ClusterState.from_objects(objects.values())
    fresh.set_static(static)
    assert served(state) == served(fresh)
    assert (state.services, state.slices) == (fresh.services, fresh.slices)
    assert list(state.conflicts) == list(fresh.conflicts)
    assert set(state.refusals) == set(fresh.refusals)


def _names():
    return [NamespacedName("static", name) for name in "ab"]


@pytest.mark.parametrize("text", ["kind: Service\nmetadata: &m [*m]\n", "kind: Service\nspec: &s {ports: *s}\n"])
def test_a_manifest_that_contains_itself_is_refused_alone(tmp_path, text):
    (tmp_path / "a.yaml").write_text(MANIFEST)
    (tmp_path / "b.yaml").write_text(text)
    found = StaticDirectory(str(tmp_path)).read()
    assert list(found.services) == [NamespacedName("static", "apiserver")]
    (refusal,) = found.refusals
    assert str(refusal).startswith(f"{tmp_path}/b.yaml: ")


def test_a_defect_of_the_parser_refuses_one_manifest(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(MANIFEST)
    (tmp_path / "b.yaml").write_text(MANIFEST.replace("apiserver", "other"))
    original = static.check_fields

    def check(raw):
        if raw["metadata"]["name"] == "other":
            raise KeyError("a defect")
        original(raw)

    monkeypatch.setattr(static, "check_fields", check)
    found = StaticDirectory(str(tmp_path)).read()
    assert list(found.services) == [NamespacedName("static", "apiserver")]
    assert any("KeyError: 'a defect'" in str(refusal) for refusal in found.refusals)
