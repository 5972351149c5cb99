# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hundreds of kubeconfigs against what kubectl makes of them, which ``python -m tests.kubeconfig`` has recorded."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import NODES
from tests.kubeconfig.__main__ import RECORDED
from tests.kubeconfig.forms import forms
from tests.kubeconfig.laboratory import Laboratory

_RECORDING = json.loads(RECORDED.read_text(encoding="utf-8"))
_NOBODY = 65534


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    made = Laboratory(tmp_path_factory.mktemp("kubeconfigs"))
    yield made
    made.witness.close()


def expected(name):
    """Return what the newest recorded version of kubectl makes of a form."""
    found = _RECORDING["forms"][name]
    return found.get(_RECORDING["versions"][-1], found)


@contextlib.contextmanager
def unprivileged(needed):
    """Root may read everything, so a form with unreadable files needs another user."""
    if needed and os.geteuid() == 0:
        os.seteuid(_NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def outcome(placed):
    form = placed.form
    try:
        with unprivileged(form.unreadable):
            connection = ApiConnection(
                kubeconfig=placed.listed if form.explicit else os.environ.get("KUBECONFIG"),
                context=form.context or None,
            )
            with contextlib.closing(ApiClient(connection, timeout=10.0)) as client:
                client.list(NODES)
        return placed.outcome(None)
    except (ApiError, ConfigurationError) as error:
        return placed.outcome(str(error))


def test_every_form_is_recorded():
    names = [form.name for form in forms()]
    assert len(names) == len(set(names)) >= 100
    assert set(names) == set(_RECORDING["forms"])


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_a_kubeconfig_leads_where_kubectl_goes(laboratory, monkeypatch, form):
    wanted = expected(form.name)
    with laboratory.placed(form) as placed:
        for name in set(os.environ) - set(placed.environment):
            monkeypatch.delenv(name)
        for name, value in placed.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(placed.folder)
        found = outcome(placed)
        monkeypatch.chdir("/")
    if "refused" in wanted:
        assert "refused" in found, wanted["refused"]
    else:
        assert found == wanted
