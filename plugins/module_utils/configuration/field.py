# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The description of one field of the configuration file: its effect and its users."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

from .values import FieldType

HONOURED = "yes"
PARTLY = "partly"
AGENT = "agent"
NOTHING = "no effect"


class Field(NamedTuple):
    """One field of the configuration file.

    ``name``: with dots, as in the file. ``attribute``: with dots, in the model; empty for a field that the model does
    not have. ``effect``: HONOURED, PARTLY (``text`` explains), AGENT (only the agent uses it), NOTHING (``text`` says
    why). ``harmless``: values that cause no warning although they differ from the default of a field without effect.
    ``kind``: the type, from which reading, validation and writing follow; None if the code states these.
    """

    name: str
    attribute: str
    default: str
    modes: str
    effect: str
    text: str
    harmless: Tuple[Any, ...] = ()
    kind: Optional[FieldType] = None
