# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every file that root opens in a directory writable by the agent's user, against every kind of hostile file."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Callable, NamedTuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base import regular_files
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.credentials import TokenFile
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import read_cache
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.drain.record import read_record
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import ledger
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import pending
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History

ROOT = Path(__file__).resolve().parents[3]
SECRET = "root:*:20000:0:99999:7:::\n"
NOBODY = 65534
SECONDS = 20.0

spec = importlib.util.spec_from_file_location("scheduled_run", ROOT / "roles/schedule/files/scheduled_run.py")
assert spec is not None and spec.loader is not None
scheduled_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scheduled_run)


class Opened(NamedTuple):
    """A file that root opens: its path below the test's directory, and the code that opens it."""

    path: str
    use: Callable[[Path], object]


def acquire_lock(top: Path) -> None:
    with ConvergenceLock(str(top / "run"), 0.2):
        pass


def read_pending(top: Path) -> object:
    (top / "confirm").chmod(0o700)
    return pending.read(str(top / "confirm"))


def history(top: Path) -> History:
    (top / "history").chmod(0o700)
    return History(str(top / "history"))


def write_metrics(top: Path) -> None:
    scheduled_run.write(str(top / "schedule" / "m.prom"), "x 1\n")


def token_of_another_user(path: Path) -> object:
    """Read it as root where the agent's user owns the link, so that the file's content cannot be a token."""
    if path.is_symlink() and not os.geteuid():
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return TokenFile(str(path)).headers()


FLOWS = ledger.Flows(serving="c")

OPENED: dict[str, Opened] = {
    "lock": Opened("run/lock", acquire_lock),
    "ledger, read": Opened("run/ledger.json", lambda top: ledger.read_ledger(str(top / "run"))),
    "ledger, written": Opened("run/ledger.json", lambda top: ledger.write_ledger(str(top / "run"), FLOWS)),
    "change that waits": Opened("confirm/pending.json", read_pending),
    "change that is reverted": Opened("confirm/reverting.json", read_pending),
    "saved state": Opened("history/state-000001.json.gz", lambda top: history(top).load(1)),
    "list of saved states": Opened("history/state-000001.json.gz", lambda top: history(top).list()),
    "outcomes": Opened("history/outcomes.json", lambda top: history(top).outcomes()),
    "token": Opened("agent/token", lambda top: token_of_another_user(top / "agent/token")),
    "cache": Opened("agent/cluster.json.gz", lambda top: read_cache(str(top / "agent/cluster.json.gz"))),
    "drain": Opened("agent/drain.json", lambda top: read_record(str(top / "agent/drain.json"), os.getuid())),
    "metrics, read": Opened("schedule/m.prom", lambda top: scheduled_run.last_success(str(top / "schedule/m.prom"))),
    "metrics, written": Opened("schedule/m.prom", write_metrics),
}


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("made-by-root"))


def hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def fifo(path: Path, _victim: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, _victim: Path) -> None:
    path.mkdir()


def device(path: Path, _victim: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero, which is endless
    except PermissionError:
        pytest.skip("this user cannot make devices")


def unix_socket(path: Path, _victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def huge(path: Path, _victim: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def bomb(path: Path, _victim: Path) -> None:
    """Write 1.5 GB compressed to 1.5 MB behind the header line of the cache."""
    zeros = gzip.compress(bytes(16 << 20), mtime=0) * 96
    path.write_bytes(zeros)


def deep_json(path: Path, _victim: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


def deep_object(path: Path, _victim: Path) -> None:
    path.write_text('{"version":' * 100_000 + "1" + "}" * 100_000)


def compressed_depth(path: Path, _victim: Path) -> None:
    path.write_bytes(gzip.compress(b"[" * 200_000 + b"\n" + b"[" * 200_000))


def other_values(path: Path, _victim: Path) -> None:
    fields = ("version", "udp_endpoints", "state", "armed", "timeout", "deadline", "format", "sha256", "written")
    path.write_text(json.dumps({field: {"a": [1, None, "\x1b[2J"]} for field in fields}))


def infinite_numbers(path: Path, _victim: Path) -> None:
    path.write_text(
        '{"state": 1, "armed": 1e999, "timeout": NaN, "deadline": "", "history_directory": "", "1": {"a": 1}}'
    )


def not_text(path: Path, _victim: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x1b[2J" * 100)


def wrong_owner(path: Path, _victim: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    path.write_text("99999999 another \x1b[31m program")
    os.chown(path, NOBODY, NOBODY)


ATTACKS = (
    *(link, link_to_nothing, hard_link, fifo, directory, device, unix_socket, huge, bomb, deep_json, deep_object),
    *(compressed_depth, other_values, infinite_numbers, not_text, wrong_owner),
)


def state_of(path: Path) -> tuple[object, ...]:
    found = path.stat()
    return path.read_text(), found.st_uid, found.st_gid, found.st_mode


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("name", OPENED)
def test_a_file_replaced_by_another_user_does_no_harm(tmp_path, name, attack):
    """Each file is refused in one line or counts as empty, at once, and no other file is changed or created."""
    opened = OPENED[name]
    victim = tmp_path / "shadow"
    victim.write_text(SECRET)
    victim.chmod(0o600)
    path = tmp_path / opened.path
    path.parent.mkdir(mode=0o755)
    attack(path, victim)
    before = state_of(victim)
    ended = []

    def use() -> None:
        try:
            ended.append(opened.use(tmp_path))
        except (ProxyError, OSError) as error:
            ended.append(error)
        except BaseException as error:
            ended.append(("crash", error))

    # Code that blocks forever in a FIFO must not block the tests.
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert ended, f"{name}: blocks"
    assert not (isinstance(ended[0], tuple) and ended[0][:1] == ("crash",)), ended
    text = str(ended[0])
    assert "\n" not in text and "\x1b" not in text and SECRET.strip() not in text
    assert state_of(victim) == before
    assert not victim.with_name("made-by-root").exists()


@pytest.mark.parametrize("name", ["lock", "ledger, written"])
def test_a_write_to_another_file_is_refused_with_its_reason(tmp_path, name):
    for attack, reason in (
        (link, "is a symbolic link, which is not followed"),
        (hard_link, "is another name of a file"),
    ):
        victim = tmp_path / attack.__name__
        victim.write_text(SECRET)
        path = tmp_path / OPENED[name].path
        path.parent.mkdir(exist_ok=True)
        attack(path, victim)
        with pytest.raises(ProxyError, match=reason):
            OPENED[name].use(tmp_path)
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts the directories of others")
def test_root_does_not_lock_where_another_user_can_write(tmp_path):
    for owner, mode in ((NOBODY, 0o755), (0, 0o775), (0, 0o1777)):
        place = tmp_path / f"{owner}-{mode:o}"
        place.mkdir()
        place.chmod(mode)
        os.chown(place, owner, 0)
        with (
            pytest.raises(ProxyError, match=f"belongs to user {owner} with mode {mode:04o}"),
            ConvergenceLock(str(place), 0.1),
        ):
            pass
        assert list(place.iterdir()) == [] and place.stat().st_uid == owner


def test_an_irreplaceable_file_can_still_be_locked_and_written(tmp_path):
    """From the agent's side: a directory that it cannot write, with files prepared for its group."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:-2]:
        if not parent.stat().st_mode & 0o005:
            parent.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    for name in ("lock", "ledger.json"):
        (run / name).touch()
        os.chown(run / name, 0, NOBODY)
        (run / name).chmod(0o660)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with ConvergenceLock(str(run), 0.1, "the agent"):
                ledger.write_ledger(str(run), FLOWS)
                said = repr(ledger.read_ledger(str(run)))
            with contextlib.suppress(OSError):
                (run / "lock").unlink()
                said = "replaced"
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == repr(FLOWS)
    assert ledger.read_ledger(str(run)) == FLOWS
    assert (run / "lock").stat().st_uid == 0


def test_only_own_links_are_followed_to_a_token(tmp_path):
    """As the kubelet projects a token: a link to a name in a directory that is a link itself."""
    (tmp_path / "2026").mkdir()
    (tmp_path / "2026" / "token").write_text("abc")
    (tmp_path / "..data").symlink_to("2026")
    (tmp_path / "token").symlink_to("..data/token")
    assert regular_files.read_with_own_links(str(tmp_path / "token"), 3) == b"abc"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        regular_files.read_with_own_links(str(tmp_path / "loop"), 3)
    if not os.geteuid():
        os.chown(tmp_path / "token", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(OSError, match=f"is a symbolic link of user {NOBODY}, which is not followed"):
            regular_files.read_with_own_links(str(tmp_path / "token"), 3)


def test_content_is_bounded_and_whole(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert regular_files.read_regular(str(path), 5) == b"12345"
    with pytest.raises(OSError, match="is larger than 4 bytes"):
        regular_files.read_regular(str(path), 4)
    packed = gzip.compress(b"123") + gzip.compress(b"45")
    assert regular_files.gunzip(packed, 5) == b"12345"
    for content, limit, reason in (
        (packed, 4, "it decompresses to more than 4 bytes"),
        (packed[:-1], 5, "it is truncated"),
        (b"", 5, "it is empty"),
        (b"12345", 5, "it is not valid gzip"),
    ):
        with pytest.raises(ValueError, match=reason):
            regular_files.gunzip(content, limit)
    with pytest.raises(ValueError, match="nested too deeply"):
        regular_files.parse_json("[" * 100_000)
