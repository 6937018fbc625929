"""Reasons of failed requests, with advice if TLS is the cause."""

from __future__ import annotations

import errno
import ssl

import aiohttp

from keepstep_mesh.security.tls import reason_of

_VERIFY_ADVICE = {
    9: "its certificate is not valid yet; compare the clocks",
    10: "its certificate has expired",
    18: "its certificate is signed by itself; put that one into KEEPSTEP_TLS_CA (--tls-ca)",
    62: "its certificate is not for this name; use the name in the certificate, or make one for this name",
    64: "its certificate is not for this address; use the name in the certificate, or make one for this address",
}
_UNKNOWN_CA = "its certificate is not from a CA that is trusted here; give that CA with KEEPSTEP_TLS_CA (--tls-ca)"
_SHOW_ONE = "give one that its CA signed: KEEPSTEP_TLS_CERT and KEEPSTEP_TLS_KEY (--tls-cert, --tls-key)"
_BROKEN_OFF = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"}


def is_away(error: BaseException) -> bool:
    """Return whether no connection was made. Otherwise TLS or the answer is the fault."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _ssl_fault(error) is None
    return isinstance(error, TimeoutError)


def _unconnected(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"host {error.host} not found ({error.os_error.strerror or error.os_error})"
    numbers = {one.errno for one in (error.os_error, *getattr(error.os_error, "exceptions", ()))}
    if errno.ECONNREFUSED in numbers:
        return "nothing listens there (connection refused)"
    return f"no connection: {error.os_error.strerror or error.os_error}"


def explained(error: BaseException, address: str) -> str:
    """Return the reason of a failed request to ``address``, with advice if TLS is the cause."""
    said = str(error) or type(error).__name__
    fault = _ssl_fault(error)
    if isinstance(error, aiohttp.ClientConnectorError) and fault is None:
        return _unconnected(error)
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(fault, ssl.SSLCertVerificationError):
        advice = _VERIFY_ADVICE.get(fault.verify_code, _UNKNOWN_CA)
        return f"{advice} ({fault.verify_message})"
    if isinstance(fault, ssl.SSLError):
        reason = fault.reason or ""
        if reason in _NO_TLS:
            return "it does not speak TLS; write http:// if that is meant"
        if "ALERT" in reason:
            return f"it does not take our certificate, or wants one; {_SHOW_ONE} ({reason_of(fault)})"
        return f"TLS failed: {reason_of(fault)}"
    if isinstance(error, _BROKEN_OFF) and not isinstance(error, aiohttp.ClientConnectorError):
        if address.startswith("https:"):
            return f"{said}; if it wants certificates of its clients, {_SHOW_ONE}"
        return f"{said}; if it speaks TLS, write https://"
    return said


def _ssl_fault(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error in, or behind, what aiohttp raises."""
    for _ in range(10):
        if error is None:
            return None
        # aiohttp's own errors are SSLErrors too, but without what the handshake said.
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        if isinstance(error, ssl.SSLError) and inner is None:
            return error
        error = inner or error.__cause__
    return None
