# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's account: made, corrected, read and removed through a client that keeps objects in memory."""

from __future__ import annotations

import base64
import copy

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import ApiStatusError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller import account
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.account import Account
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import ApiError, ConfigurationError

WHO = Account("kube-system", "kubenode-proxy")
SECRET = "/api/v1/namespaces/kube-system/secrets/kubenode-proxy"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/kubenode-proxy"
BINDING = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/kubenode-proxy"


class MemoryClient:
    """Answers like an API server; ``late`` is how many reads of a Secret see it without its token."""

    def __init__(self, late=0):
        self.objects = {}
        self.log = []
        self.late = late

    def send(self, method, path, body, purpose):
        if method != "GET":
            self.log.append((method, path))
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            metadata = {**body["metadata"], "uid": path, "resourceVersion": "1"}
            self.objects[path] = {**copy.deepcopy(body), "metadata": metadata}
        elif path not in self.objects:
            raise ApiStatusError(f"{purpose}: not found", 404)
        elif method == "PUT":
            self.objects[path] = copy.deepcopy(body)
        elif method == "DELETE":
            return self.objects.pop(path)
        if path == SECRET and method == "GET":
            if self.late:
                self.late -= 1
            else:
                self.objects[path]["data"] = {"token": base64.b64encode(b"secret-token").decode()}
        return copy.deepcopy(self.objects[path])


def test_made_once_and_then_left_alone():
    client = MemoryClient()
    first = account.ensure(client, WHO)
    assert first.token == "secret-token" and len(first.changes) == 4
    client.log.clear()
    assert account.ensure(client, WHO) == account.Outcome((), "secret-token")
    assert client.log == []


def test_check_changes_nothing():
    client = MemoryClient()
    outcome = account.ensure(client, WHO, check=True)
    assert (len(outcome.changes), outcome.token, client.log, client.objects) == (4, None, [], {})


def test_rights_are_reading_and_events_only():
    verbs = {verb for rule in account.RULES for verb in rule["verbs"]}
    resources = {name for rule in account.RULES for name in rule["resources"]}
    assert verbs == {"get", "list", "watch", "create"}
    assert resources == {"services", "nodes", "endpointslices", "servicecidrs", "events"}


def test_wider_rights_are_taken_back_and_foreign_labels_stay():
    client = MemoryClient()
    account.ensure(client, WHO)
    client.objects[ROLE]["rules"].append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    client.objects[ROLE]["metadata"]["labels"]["team"] = "network"
    client.log.clear()
    assert account.ensure(client, WHO).changes == ("ClusterRole kubenode-proxy corrected",)
    assert client.log == [("PUT", ROLE)]
    assert client.objects[ROLE]["rules"] == list(account.RULES)
    assert client.objects[ROLE]["metadata"]["labels"]["team"] == "network"


def test_binding_to_another_role_is_an_error():
    client = MemoryClient()
    account.ensure(client, WHO)
    client.objects[BINDING]["roleRef"]["name"] = "cluster-admin"
    with pytest.raises(ConfigurationError, match=r"ClusterRoleBinding kubenode-proxy: roleRef: .* delete the object"):
        account.ensure(client, WHO)


def test_token_is_waited_for():
    pauses = []
    assert account.ensure(MemoryClient(late=5), WHO, sleep=pauses.append).token == "secret-token"
    assert 3 <= len(pauses) <= 5
    with pytest.raises(ApiError, match=r"Secret kube-system/kubenode-proxy: data.token: .* within 1 s"):
        account.ensure(MemoryClient(late=100), WHO, timeout=1, sleep=pauses.append)


def test_only_own_objects_are_removed():
    client = MemoryClient()
    account.ensure(client, WHO)
    del client.objects[ROLE]["metadata"]["labels"]
    assert len(account.remove(client, WHO, check=True).changes) == 3 and len(client.objects) == 4
    assert len(account.remove(client, WHO).changes) == 3
    assert list(client.objects) == [ROLE]
    assert account.remove(client, WHO).changes == ()


@pytest.mark.parametrize("who", [Account("kube/system", "a"), Account("kube-system", "../a"), Account("", "a")])
def test_names_that_are_not_labels_are_refused(who):
    with pytest.raises(ConfigurationError, match="is not a DNS label"):
        account.wanted_objects(who)
