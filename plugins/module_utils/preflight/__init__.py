# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks for missing features and conflicts on a node before anything is changed. They only read.

``check.preflight`` returns all findings, ``findings.judge`` turns them into an error or into warnings.
"""
