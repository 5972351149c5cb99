# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that contains the node's own token for the API server."""

from __future__ import annotations

import contextlib
import os

from ....base.errors import ConfigurationError, os_errors
from ....base.regular_files import SMALL, read_regular
from ....base.whole_files import write_whole
from .service_token import parse_token

_MODE = 0o600


def read_token(path: str) -> str:
    """Return the token in a file. Raises ConfigurationError, FileNotFoundError if the file does not exist."""
    try:
        return read_regular(path, SMALL).decode("ascii").strip()
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: the token is not ASCII text") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: the token cannot be read: {error.strerror}") from error


def is_private(path: str) -> bool:
    """Return whether the file is usable by the owner of its directory, and by no other user. Raises OSError."""
    place, found = os.stat(os.path.dirname(path) or "."), os.stat(path)
    return (found.st_uid, found.st_mode & 0o777) == (place.st_uid, _MODE)


def store_token(path: str, token: str) -> bool:
    """Write a token atomically, owned by the owner of its directory, and return whether the file changed.

    Raises ConfigurationError if the text is not a token of a ServiceAccount or the file cannot be written.
    """
    parse_token(token)
    with contextlib.suppress(ConfigurationError, FileNotFoundError):
        if read_token(path) == token:
            return False
    with os_errors(ConfigurationError, f"{path}: the token cannot be written"):
        place = os.stat(os.path.dirname(path) or ".")
        owner = None if os.geteuid() else (place.st_uid, place.st_gid)
        write_whole(path, token.encode("ascii") + b"\n", _MODE, owner)
    return True
