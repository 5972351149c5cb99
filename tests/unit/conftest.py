# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Property tests check correctness, not speed: on a busy machine an example may take any time."""

from __future__ import annotations

from hypothesis import settings

from tests.campaigns import examples

settings.register_profile("project", deadline=None, max_examples=examples(100))
settings.load_profile("project")
