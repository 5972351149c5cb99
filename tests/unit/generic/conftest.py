# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""API servers behind an address, for the tests of kubelet's kubeconfig."""

from __future__ import annotations

from typing import Iterator

import pytest

from tests.apiserver.tls import Certificates, make_certificates
from tests.unit.generic.kubelet_files import ADDRESS, NAMES, TlsServer


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("good"), NAMES)


@pytest.fixture
def servers(good) -> Iterator[list[TlsServer]]:
    """Provide two API servers, and the address that is redirected to them."""
    found = [TlsServer("127.0.0.1", good), TlsServer("127.0.0.2", good), TlsServer(ADDRESS, good)]
    yield found
    for server in found:
        server.close()
