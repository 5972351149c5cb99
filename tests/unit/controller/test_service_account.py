# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's account: created, corrected, read and removed through a client that keeps objects in memory."""

from __future__ import annotations

import copy

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.service_token import parse_token
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import service_account
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.service_account import Account
from tests.apiserver.accounts import Accounts

WHO = Account("kube-system", "kubenode-proxy")
SECRET = "/api/v1/namespaces/kube-system/secrets/kubenode-proxy"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/kubenode-proxy"
ACCOUNT = "/api/v1/namespaces/kube-system/serviceaccounts/kubenode-proxy"
BINDING = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/kubenode-proxy"


class MemoryClient:
    """A client with objects in memory; ``late`` is how many reads of a Secret return it without its token."""

    def __init__(self, late=0, nodes=()):
        self.nodes = dict(nodes)
        self.accounts = Accounts(lambda name: self.nodes.get(name, ""))
        self.accounts.late = late

    @property
    def objects(self):
        return self.accounts.objects

    @property
    def log(self):
        return self.accounts.writes

    def send(self, method, path, body, purpose):
        code, answer = self.accounts.answer(method, path, copy.deepcopy(body))
        if code >= 300:
            raise ApiStatusError(f"{purpose}: {answer['message']}", code, answer["reason"])
        return copy.deepcopy(answer)

    def post(self, path, body, purpose):
        return self.send("POST", path, body, purpose)

    def get(self, resource, name, namespace=""):
        if name not in self.nodes:
            raise ApiStatusError(f"{resource.name} {name}: not found", 404, "NotFound")
        return {"kind": "Node", "metadata": {"name": name, "uid": self.nodes[name]}}


def test_account_is_created_once_and_then_unchanged():
    client = MemoryClient()
    first = service_account.ensure(client, WHO)
    assert first.token is None and len(first.changes) == 5 and first.uid and first.warnings == ()
    client.log.clear()
    assert service_account.ensure(client, WHO) == service_account.AccountChange((), None, first.uid)
    assert client.log == []


def test_a_shared_token_comes_with_a_warning_as_long_as_it_is_valid():
    client = MemoryClient()
    made = service_account.ensure(client, WHO, shared=True)
    assert len(made.changes) == 6 and client.accounts.review(made.token)
    assert "is the same for all nodes and never expires" in made.warnings[0]
    (warning,) = service_account.ensure(client, WHO).warnings
    assert "Secret kube-system/kubenode-proxy: its token never expires and is still valid" in warning
    service_account.rotate(client, WHO)
    assert service_account.ensure(client, WHO).warnings == ()


def test_check_changes_nothing():
    client = MemoryClient()
    outcome = service_account.ensure(client, WHO, check=True)
    assert (len(outcome.changes), outcome.token, client.log, client.objects) == (5, None, [], {})
    service_account.ensure(client, WHO, shared=True)
    before = copy.deepcopy(client.objects)
    assert len(service_account.rotate(client, WHO, check=True)) == 2 and client.objects == before


def test_check_names_a_right_that_is_missing():
    class Forbidding(MemoryClient):
        def send(self, method, path, body, purpose):
            if method != "GET":
                assert path.endswith("?dryRun=All")
                raise ApiStatusError(f"{purpose}: forbidden", 403, "Forbidden")
            return super().send(method, path, body, purpose)

    with pytest.raises(ApiError, match="create ServiceAccount kube-system/kubenode-proxy: forbidden"):
        service_account.ensure(Forbidding(), WHO, check=True)


def test_rights_are_limited_to_reading_and_events():
    verbs = {verb for rule in service_account.RULES for verb in rule["verbs"]}
    resources = {name for rule in service_account.RULES for name in rule["resources"]}
    assert verbs == {"get", "list", "watch", "create"}
    assert resources == {"services", "nodes", "endpointslices", "servicecidrs", "events"}


def test_rights_for_network_policies_follow_the_setting():
    client = MemoryClient()
    service_account.ensure(client, WHO, policies=True)
    rules = client.objects[ROLE]["rules"]
    assert rules == [*service_account.RULES, *service_account.POLICY_RULES]
    assert {verb for rule in service_account.POLICY_RULES for verb in rule["verbs"]} == {"list", "watch"}
    assert service_account.ensure(client, WHO).changes == ("ClusterRole kubenode-proxy corrected",)
    assert client.objects[ROLE]["rules"] == list(service_account.RULES)


def test_wider_rights_are_revoked_and_external_labels_kept():
    client = MemoryClient()
    service_account.ensure(client, WHO)
    client.objects[ROLE]["rules"].append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    client.objects[ROLE]["metadata"]["labels"]["team"] = "network"
    client.log.clear()
    assert service_account.ensure(client, WHO).changes == ("ClusterRole kubenode-proxy corrected",)
    assert client.log == [f"PUT {ROLE}"]
    assert client.objects[ROLE]["rules"] == list(service_account.RULES)
    assert client.objects[ROLE]["metadata"]["labels"]["team"] == "network"


def test_binding_to_another_role_is_an_error():
    client = MemoryClient()
    service_account.ensure(client, WHO)
    client.objects[BINDING]["roleRef"]["name"] = "cluster-admin"
    with pytest.raises(ConfigurationError, match=r"ClusterRoleBinding kubenode-proxy: roleRef: .* delete the object"):
        service_account.ensure(client, WHO)


def test_token_is_waited_for():
    pauses = []
    assert service_account.ensure(MemoryClient(late=5), WHO, shared=True, sleep=pauses.append).token
    assert 3 <= len(pauses) <= 5
    with pytest.raises(ApiError, match=r"Secret kube-system/kubenode-proxy: data.token: .* within 1 s"):
        service_account.ensure(MemoryClient(late=100), WHO, shared=True, timeout=1, sleep=pauses.append)


def test_deleting_the_secret_restores_the_leaked_token_but_rotation_does_not():
    client = MemoryClient()
    leaked = service_account.ensure(client, WHO, shared=True).token
    client.send("DELETE", SECRET, None, "delete")
    assert client.accounts.review(leaked) == ""
    assert service_account.ensure(client, WHO, shared=True).token == leaked
    assert len(service_account.rotate(client, WHO)) == 2
    assert client.accounts.review(leaked) == ""
    other = service_account.ensure(client, WHO, shared=True)
    assert other.token != leaked and client.accounts.review(other.token) and client.accounts.review(leaked) == ""


def test_rotation_keeps_objects_of_other_owners():
    client = MemoryClient()
    service_account.ensure(client, WHO, shared=True)
    del client.objects[ACCOUNT]["metadata"]["labels"]
    with pytest.raises(ConfigurationError, match=r"ServiceAccount kube-system/kubenode-proxy: lacks the label"):
        service_account.rotate(client, WHO)
    assert ACCOUNT in client.objects


def test_a_node_has_a_token_of_its_own_that_ends_with_its_node():
    client = MemoryClient(nodes={"n1": "u1", "n2": "u2"})
    uid = service_account.ensure(client, WHO).uid
    tokens = [service_account.node_token(client, WHO, name, 3600) for name in ("n1", "n2", "n1")]
    assert len({found.token for found in tokens}) == 3 and not any(found.warnings for found in tokens)
    said = parse_token(tokens[0].token)
    assert said[:5] == ("kube-system", "kubenode-proxy", uid, "n1", "u1")
    assert said.lifetime == 3600 and said.renewal == said.issued + 1800
    assert client.accounts.review(tokens[0].token) == ACCOUNT
    client.nodes["n1"] = "another"
    assert client.accounts.review(tokens[0].token) == "" and client.accounts.review(tokens[1].token) == ACCOUNT
    service_account.rotate(client, WHO)
    assert client.accounts.review(tokens[1].token) == ""


def test_the_account_may_request_only_its_own_tokens():
    client = MemoryClient()
    service_account.ensure(client, WHO)
    service_account.ensure(client, Account("kube-system", "other"))
    service_account.ensure(client, Account("default", "kubenode-proxy"))
    asked = [
        *(("POST", f"{ACCOUNT}/token"), ("POST", f"{ACCOUNT[:-14]}other/token"), ("GET", SECRET), ("DELETE", ACCOUNT)),
        ("POST", "/api/v1/namespaces/default/serviceaccounts/kubenode-proxy/token"),
    ]
    assert [client.accounts.allowed(ACCOUNT, *what) for what in asked] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("nodes", "binds", "requests", "warning", "ends"),
    [
        ({}, True, True, "there is no such Node", True),
        ({"n1": "u1"}, False, True, "the API server cannot bind a token to a Node", True),
        ({"n1": "u1"}, True, False, "has no TokenRequest", False),
    ],
)
def test_missing_server_features_are_reported(nodes, binds, requests, warning, ends):
    client = MemoryClient(nodes=nodes)
    service_account.ensure(client, WHO)
    client.accounts.binds_nodes, client.accounts.has_requests = binds, requests
    found = service_account.node_token(client, WHO, "n1", 3600)
    assert warning in found.warnings[-1] and client.accounts.review(found.token) == ACCOUNT
    assert bool(parse_token(found.token).expires) is ends and parse_token(found.token).node == ""
    if not requests:
        assert service_account.node_token(client, WHO, "n1", 3600).token == found.token


def test_an_absent_account_is_an_error_and_is_not_created():
    for requests in (True, False):
        client = MemoryClient(nodes={"n1": "u1"})
        client.accounts.has_requests = requests
        for node in ("n1", "n2"):
            with pytest.raises(ApiStatusError, match=r"create a token for ServiceAccount kube-system/kubenode-proxy: "):
                service_account.node_token(client, WHO, node, 3600)
        assert (client.log, client.objects) == ([], {})


def test_a_node_deleted_meanwhile_has_a_token_that_expires(monkeypatch):
    client = MemoryClient(nodes={"n1": "u1"})
    service_account.ensure(client, WHO)
    post = client.post

    def post_after_deletion(path, body, purpose):
        client.nodes.clear()
        return post(path, body, purpose)

    monkeypatch.setattr(client, "post", post_after_deletion)
    client.log.clear()
    found = service_account.node_token(client, WHO, "n1", 3600)
    assert parse_token(found.token).lifetime == 3600 and "there is no such Node" in found.warnings[0]
    assert client.log == []


def test_the_shared_token_needs_the_secret_only():
    client = MemoryClient(nodes={"n1": "u1"})
    service_account.ensure(client, WHO, policies=True)
    client.accounts.has_requests = False
    client.log.clear()
    found = service_account.node_token(client, WHO, "n1", 3600)
    assert client.accounts.review(found.token) == ACCOUNT
    assert client.log == [f"POST {SECRET}"]
    assert client.objects[ROLE]["rules"] == [*service_account.RULES, *service_account.POLICY_RULES]


def test_only_own_objects_are_removed():
    client = MemoryClient()
    service_account.ensure(client, WHO)
    del client.objects[ROLE]["metadata"]["labels"]
    assert len(service_account.remove(client, WHO, check=True).changes) == 4 and len(client.objects) == 5
    assert len(service_account.remove(client, WHO).changes) == 4
    assert list(client.objects) == [ROLE]
    assert service_account.remove(client, WHO).changes == ()


@pytest.mark.parametrize("who", [Account("kube/system", "a"), Account("kube-system", "../a"), Account("", "a")])
def test_names_that_are_not_labels_are_refused(who):
    with pytest.raises(ConfigurationError, match="is not a DNS label"):
        service_account.wanted_objects(who)
