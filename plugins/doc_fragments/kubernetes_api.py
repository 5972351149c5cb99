# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of modules that read the cluster's state from an API server."""

from __future__ import annotations


class ModuleDocFragment:
    """``kubenode.proxy.kubernetes_api``: how to reach the API server."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - Path of a kubeconfig file, on the host on which the module runs.
      - If not given, the environment variables E(K8S_AUTH_KUBECONFIG) and E(KUBECONFIG) are looked at.
    type: path
  context:
    description:
      - Name of a context in the kubeconfig file. The file's current context by default.
      - If not given, the environment variable E(K8S_AUTH_CONTEXT) is looked at.
    type: str
  host:
    description:
      - URL of the API server, for example V(https://192.0.2.10:6443). Needs no kubeconfig file.
      - If not given, the environment variable E(K8S_AUTH_HOST) is looked at.
    type: str
  api_key:
    description:
      - Bearer token.
      - If not given, the environment variable E(K8S_AUTH_API_KEY) is looked at.
    type: str
  ca_cert:
    description:
      - Path of the certificate authority that has signed the API server's certificate.
      - If not given, the environment variable E(K8S_AUTH_SSL_CA_CERT) is looked at.
    type: path
    aliases: [ssl_ca_cert]
  client_cert:
    description:
      - Path of a client certificate.
      - If not given, the environment variable E(K8S_AUTH_CERT_FILE) is looked at.
    type: path
    aliases: [cert_file]
  client_key:
    description:
      - Path of the key of O(client_cert).
      - If not given, the environment variable E(K8S_AUTH_KEY_FILE) is looked at.
    type: path
    aliases: [key_file]
  validate_certs:
    description:
      - Whether the API server's certificate is verified. As the kubeconfig file says by default, otherwise V(true).
      - If not given, the environment variable E(K8S_AUTH_VERIFY_SSL) is looked at.
    type: bool
    aliases: [verify_ssl]
  api_timeout:
    description:
      - Seconds that one request to the API server may take. Lists are read in pages, each its own request.
    type: float
    default: 30.0
"""
