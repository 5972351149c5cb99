# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of modules that read the cluster's state from an API server."""

from __future__ import annotations


class ModuleDocFragment:
    """Document how to connect to the API server (``kubenode.proxy.kubernetes_api``)."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - Path of a kubeconfig file, on the host on which the module runs, or several paths joined by colons, which are
        merged as by kubectl.
      - If not given, the environment variables E(K8S_AUTH_KUBECONFIG) and E(KUBECONFIG) are used.
    type: path
  context:
    description:
      - Name of a context in the kubeconfig file. The file's current context by default.
      - If not given, the environment variable E(K8S_AUTH_CONTEXT) is used.
    type: str
  host:
    description:
      - URL of the API server, for example V(https://192.0.2.10:6443). No kubeconfig file is needed then.
      - If not given, the environment variable E(K8S_AUTH_HOST) is used.
    type: str
  api_key:
    description:
      - Bearer token.
      - If not given, the environment variable E(K8S_AUTH_API_KEY) is used.
    type: str
  ca_cert:
    description:
      - Path of the certificate of the authority that signed the API server's certificate.
      - If not given, the environment variable E(K8S_AUTH_SSL_CA_CERT) is used.
    type: path
    aliases: [ssl_ca_cert]
  client_cert:
    description:
      - Path of a client certificate.
      - If not given, the environment variable E(K8S_AUTH_CERT_FILE) is used.
    type: path
    aliases: [cert_file]
  client_key:
    description:
      - Path of the private key of O(client_cert).
      - If not given, the environment variable E(K8S_AUTH_KEY_FILE) is used.
    type: path
    aliases: [key_file]
  validate_certs:
    description:
      - Whether to verify the API server's certificate. Defaults to the setting of the kubeconfig file, or V(true).
      - If not given, the environment variable E(K8S_AUTH_VERIFY_SSL) is used.
    type: bool
    aliases: [verify_ssl]
  api_timeout:
    description:
      - Timeout of one request to the API server, in seconds. Lists are read in pages, one request per page.
    type: float
    default: 30.0
"""
