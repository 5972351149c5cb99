# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Restoration of kernel parameters that another program has changed.

The kernel sends no notifications of such changes, so the parameters are read regularly; that costs less than a
millisecond. Programs that change them are, for example, tuned, Docker, and ``sysctl --system`` after an update.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Tuple

from ...base.errors import KernelError
from ...convergence.modes.stages.sysctls import sysctl_stage
from ...kernel.parameters.sysctls import Wanted
from ...resources import Change, plan

#: Seconds between reads of the parameters.
PARAMETERS_SECONDS = 10.0


class RepairedParameters(NamedTuple):
    """Parameters that were restored, each with the value found and the value wanted.

    ``refused``: one line for each parameter that the kernel refused to change.
    """

    repaired: Dict[str, Tuple[str, str]]
    refused: List[str]


def repair_parameters(wanted: Mapping[str, Wanted]) -> RepairedParameters:
    """Restore each kernel parameter that differs from its wanted value.

    Parameters that cannot be changed in this container or network namespace are skipped, as at the start. Raises
    KernelError if a parameter cannot be read.
    """
    stage, _unchangeable = sysctl_stage(wanted)
    found = RepairedParameters({}, [])
    for resource, change, *_observed in plan([stage]):
        parts = [(key, Change(replaced={key: values})) for key, values in change.replaced.items()]
        parts += [(key, Change(added={key: value})) for key, value in change.added.items()]
        for key, part in parts:
            try:
                resource.apply(part)
            except KernelError as error:
                found.refused.append(str(error))
            else:
                # A parameter that the kernel does not have is an addition, which apply() refuses.
                found.repaired[key] = change.replaced[key]
    return found
