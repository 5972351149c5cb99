# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs of a module that end early, because input, engine and kernel have not changed since the last complete run.

A complete run of nftables mode leaves a record (:mod:`.record`): digests of its input (:mod:`.inputs`), the state of
the node that its result depends on (:mod:`.surroundings`), and the result. The next run returns that result if all of
these are the same (:mod:`.decision`); otherwise, and whenever in doubt, the run is complete. Nothing here decides what
is programmed, and nothing imports the parts of the engine that do (see "Imports inside functions" in
docs/architecture.md).
"""
