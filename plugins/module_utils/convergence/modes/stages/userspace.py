# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages of the device of userspace mode and its addresses, and of their removal."""

from __future__ import annotations

from ....base.addresses import FAMILIES
from ....kernel.rtnetlink.links import AddressDeviceResource, AddressesResource
from ....rendering.userspace.model import DEVICE
from ....resources import Stage
from ...handles import KernelHandles


def address_device_stage(handles: KernelHandles) -> Stage:
    """Return the stage of the device of userspace mode. Raises KernelError."""
    resource = AddressDeviceResource(handles.route, DEVICE)
    return Stage(resource, resource.desired)


def userspace_addresses(handles: KernelHandles, family: str) -> AddressesResource:
    """Return the addresses on the device of userspace mode. Raises KernelError."""
    return AddressesResource(handles.route, family, DEVICE, deprecated=True)


def userspace_device_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages that remove the device of userspace mode and its addresses. Raises KernelError."""
    device = AddressDeviceResource(handles.route, DEVICE)
    addresses = [Stage(userspace_addresses(handles, family), {}) for family in FAMILIES]
    return [Stage(device, {}), *addresses]


def userspace_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages that remove the device of userspace mode, its addresses, and listeners of the running agent.

    Connections through the agent are reset. They could not continue: another mode redirects their next packets, which
    connection tracking does not know, to an endpoint. Raises KernelError.
    """
    listeners = [Stage(item, {}) for item in handles.listeners.left(FAMILIES)]
    return [*userspace_device_removal_stages(handles), *listeners]
