# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of a configuration back to the form of its file, for /configz and for rendered files."""

from __future__ import annotations

from typing import Any, Dict

from .field import value_of
from .fields import FIELDS
from .model import API_VERSION, KIND, KubeProxyConfiguration


def to_mapping(configuration: KubeProxyConfiguration) -> Dict[str, Any]:
    """Return the configuration as a KubeProxyConfiguration v1alpha1 object in JSON types, with all defaults filled in.

    Loading the result gives the same configuration.
    """
    found: Dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "featureGates": dict(configuration.feature_gates),
    }
    for field in FIELDS:
        if field.kind:
            section, _dot, name = field.name.rpartition(".")
            fields = found.setdefault(section, {}) if section else found
            fields[name] = field.kind.to_json(value_of(configuration, field.attribute))
    found["logging"].update(configuration.logging.rest)
    found["nodePortAddresses"] = list(configuration.effective_node_port_addresses)
    return found
