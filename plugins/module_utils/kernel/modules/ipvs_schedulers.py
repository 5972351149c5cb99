# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IPVS schedulers that virtual servers can have. A scheduler is a kernel module, which may be missing."""

from __future__ import annotations

from typing import AbstractSet

from ..built_in import answers
from ..facts import kernel_release
from .module_profile import scheduler_module
from .modules import available_modules, present_modules


def usable_schedulers(names: AbstractSet[str], load: bool, root: str = "") -> frozenset[str]:
    """Return those schedulers that the kernel has, or whose module is installed.

    ``load``: have the kernel load installed modules, and return only schedulers that it then has; IPVS must be loaded.
    Without it nothing changes. ``root``: as for :func:`.modules.present_modules`. Raises ConfigurationError for a name
    that cannot be a scheduler's.
    """
    if not names:
        return frozenset()
    modules = {scheduler_module(name): name for name in names}
    release = kernel_release()
    present = present_modules(modules, release, root)
    installed = (modules.keys() - present) & available_modules(release, root)
    if load:
        # The kernel tries to load the module that a request names, even for a process that may not load modules.
        installed = {module for module in installed if answers(module, lambda _module: True)}
    return frozenset(modules[module] for module in present | installed)
