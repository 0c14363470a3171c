"""Why a connection does not come about, in words a user can act on. gRPC says `Socket closed` to most of it.

The standard library's TLS shakes hands with the same endpoint once more and tells what it finds. Asked only after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from specdec.runtime.tls import ClientTls

PROBE_S = 2.0  # for the connection and the handshake
ALERT_S = 0.3  # a server that misses our certificate says so right behind a TLS 1.3 handshake
_TO_PLAIN = "the server speaks TLS, and this side does not: name its authority with --tls-ca FILE (SPECDEC_TLS_CA)"
CERTIFICATE_WANTED = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")


async def why(endpoint: str, tls: ClientTls | None) -> str:
    """Empty when nothing about TLS is wrong, or nobody listens. Does not raise."""
    host, _, port = endpoint.rpartition(":")
    host = host.rpartition("/")[2].strip("[]")
    try:
        async with asyncio.timeout(PROBE_S):
            return await _why(host, int(port), tls)
    except (OSError, ValueError, TimeoutError):
        return ""


async def _why(host: str, port: int, tls: ClientTls | None) -> str:
    try:
        context = tls.context() if tls is not None else _anything()
        await _shake_hands(host, port, context, tls.server_name if tls is not None else "")
    except ssl.SSLCertVerificationError as error:
        return f"the server's certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        return _of(error.reason or "", tls)
    return _TO_PLAIN if tls is None else ""


def _of(reason: str, tls: ClientTls | None) -> str:
    if tls is None:  # an answer in TLS is an answer
        return "" if reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING") else _TO_PLAIN
    if reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS, and this side does: leave --tls-ca (SPECDEC_TLS_CA) out, or turn TLS on there"
    if any(word in reason for word in CERTIFICATE_WANTED) and tls.cert is None:
        return (
            "the server asks for a certificate: give --tls-cert FILE and --tls-key FILE (SPECDEC_TLS_CLIENT_CERT, SPECDEC_TLS_CLIENT_KEY)"
        )
    return f"the handshake failed: {reason.lower().replace('_', ' ')}" if "ALERT" in reason else ""


def _anything() -> ssl.SSLContext:
    """Trusts everybody: nothing is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def _shake_hands(host: str, port: int, context: ssl.SSLContext, name: str) -> None:
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), ALERT_S)
    finally:
        writer.transport.abort()
