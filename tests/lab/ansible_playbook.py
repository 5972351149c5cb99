# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ansible-playbook, and keep the payloads of modules and their compiled code between runs.

    python tests/lab/ansible_playbook.py [OPTION...] PLAYBOOK

Ansible packs each module once per run, with the files of module_utils that it imports: for the module service_proxy 300
files, which takes more than a second. It keeps the payloads in a temporary directory. This program puts there what
earlier runs with the same Ansible and the same plugins have packed, and keeps what the run adds. The playbooks of
Molecule and of `make played`, and the commands of the documentation, run without it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAYLOADS = ROOT / ".cache" / "payloads"
COMPILED = ROOT / ".cache" / "compiled"
#: The directory with the file sitecustomize.py, which Python imports when it starts.
SITE = Path(__file__).resolve().parent / "compiled"
_DAY = 24 * 3600


def ansible_playbook() -> list[str]:
    """Return the beginning of a command line that runs this program."""
    return [sys.executable, str(Path(__file__).resolve())]


def compiled_environment() -> dict[str, str]:
    """Return the variables with which a local Python keeps the compiled code of archives."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"KUBENODE_COMPILED": str(COMPILED), "PYTHONPATH": path}


def payload_key(collection: Path, ansible: str) -> str:
    """Return a name for all that payloads depend on: Ansible's version, the collection's plugins and redirections."""
    digest = hashlib.sha256(f"{ansible} {sys.version}".encode())
    for path in sorted([*(collection / "plugins").rglob("*.py"), *(collection / "meta").glob("*.yml")]):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(collection)} {content}\n".encode())
    return digest.hexdigest()[:24]


def provide(kept: Path, local: Path) -> None:
    """Link the kept payloads into Ansible's directory."""
    local.mkdir(parents=True)
    if kept.is_dir():
        os.utime(kept)
        for payload in kept.glob("[!.]*"):
            (local / payload.name).symlink_to(payload)


def keep(kept: Path, local: Path) -> None:
    """Copy the payloads that Ansible has added to its directory, and remove those that no run has used for a day."""
    added = [path for path in local.iterdir() if not path.is_symlink() and path.suffix != ".lock"]
    if added:
        kept.mkdir(parents=True, exist_ok=True)
    for path in added:
        with tempfile.NamedTemporaryFile(dir=kept, prefix=".", delete=False) as partial:
            partial.write(path.read_bytes())
        os.rename(partial.name, kept / path.name)
    for directory in kept.parent.glob("*"):
        if directory.stat().st_mtime < time.time() - _DAY:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run ansible-playbook with the arguments of the command line."""
    # The modules beside this file are not Ansible's.
    sys.path.remove(str(Path(__file__).resolve().parent))
    from ansible import constants
    from ansible.cli.playbook import main as run
    from ansible.release import __version__

    first = os.environ["ANSIBLE_COLLECTIONS_PATH"].split(os.pathsep)[0]
    collection = Path(first, "ansible_collections", "kubenode", "proxy")
    key = payload_key(collection, __version__)
    local = Path(constants.DEFAULT_LOCAL_TMP, "ansiballz_cache")
    provide(PAYLOADS / key, local)
    sys.argv[0] = "ansible-playbook"
    try:
        run()
    finally:
        # A payload that was packed while the files changed belongs to no key.
        if payload_key(collection, __version__) == key:
            keep(PAYLOADS / key, local)


if __name__ == "__main__":
    main()
