# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is missing or in the way on a node, found before anything is touched; reading only.

``check.preflight`` gives all findings, ``findings.judge`` turns them into an error or into warnings.
"""
