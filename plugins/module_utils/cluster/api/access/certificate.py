# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verification of an API server's certificate for a name other than the address of the connection."""

from __future__ import annotations

import socket
import ssl
from typing import NamedTuple

from ....base.addresses import address_and_port
from ....base.errors import ApiError
from ..connection import Access

#: X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h.
_OTHER_NAME = (62, 64)
_MOST_NAMES = 12


class Place(NamedTuple):
    """An address and a port to connect to."""

    address: str
    port: int

    def __str__(self) -> str:
        return address_and_port(self.address, self.port)


def verified_certificate(access: Access, place: Place, name: str, seconds: float) -> bytes:
    """Return the certificate (DER) that the server at a place presents, verified by the authority and for ``name``.

    ``access`` has the authority. Each step may take ``seconds``. Raises ApiError, which names what the certificate
    lacks, and ConfigurationError if the authority's file cannot be used.
    """
    context = access.tls_context()
    try:
        return _presented(context, place, name, seconds)
    except ssl.SSLCertVerificationError as error:
        reason, code = error.verify_message, error.verify_code
    except (socket.timeout, TimeoutError) as error:
        raise ApiError(f"API server {place}: no answer within {seconds:g} seconds") from error
    except (OSError, ValueError) as error:
        raise ApiError(
            f"API server {place}: cannot be reached by TLS: {getattr(error, 'strerror', '') or error}"
        ) from error
    if code in _OTHER_NAME:
        raise ApiError(
            f"API server {place}: its certificate lacks the name {name}; it has {_names(context, place, seconds)}"
        )
    raise ApiError(f"API server {place}: its certificate cannot be verified by the kubeconfig's authority: {reason}")


def _presented(context: ssl.SSLContext, place: Place, name: str, seconds: float) -> bytes:
    with socket.create_connection(place, seconds) as plain, context.wrap_socket(plain, server_hostname=name) as sock:
        return sock.getpeercert(binary_form=True) or b""


def _names(context: ssl.SSLContext, place: Place, seconds: float) -> str:
    """Return the names in a certificate signed by the authority, or why they cannot be read."""
    context.check_hostname = False
    try:
        with socket.create_connection(place, seconds) as plain, context.wrap_socket(plain) as sock:
            found = sock.getpeercert() or {}
    except OSError as error:
        return f"names that cannot be read ({error.strerror or error})"
    names: list[str] = [str(item[1]) for item in found.get("subjectAltName", ()) if len(item) == 2]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none") + more
