"""Why a connection does not come about, in words a user can act on. gRPC says `Socket closed` or `failed to connect to all addresses` to
most of it.

The standard library's sockets and TLS try the same endpoint once more and tell what they find. Asked only after a failure.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from specdec.runtime.tls import ClientTls

PROBE_S = 2.0  # for the connection and the handshake
WORD_S = 0.5  # for the first word behind the handshake
_TO_PLAIN = "the server speaks TLS, and this side does not: name its authority with --tls-ca FILE (SPECDEC_TLS_CA)"
_TO_TLS = "the server does not speak TLS, and this side does: leave --tls-ca (SPECDEC_TLS_CA) out, or turn TLS on there"
_NO_CERTIFICATE = "the server asks for a certificate: give --tls-cert FILE and --tls-key FILE (SPECDEC_TLS_CLIENT_CERT, …_KEY)"
_NOT_OURS = "the server does not accept this side's certificate, --tls-cert (SPECDEC_TLS_CLIENT_CERT); its log says why"


async def why(endpoint: str, tls: ClientTls | None) -> str:
    """Goes behind `host:port: `. Empty where somebody listens and nothing about TLS is wrong. Does not raise."""
    host, _, port = endpoint.rpartition(":")
    host = host.rpartition("/")[2].strip("[]")
    try:
        async with asyncio.timeout(PROBE_S):
            return await (_of_plain(host, int(port)) if tls is None else _of_tls(host, int(port), tls))
    except TimeoutError:
        return f"nobody answers within {PROBE_S:g} s; is the host up, and is the port let through?"
    except socket.gaierror as error:
        return f"the name is not known ({error.strerror}); is it spelt right?"
    except ConnectionResetError:
        return ""
    except OSError as error:  # of a name with several addresses without a number: all of them failed
        return f"nobody answers ({os.strerror(error.errno)}); is the service up?" if error.errno else "nobody answers; is the service up?"
    except ValueError:
        return ""


async def _of_plain(host: str, port: int) -> str:
    """An answer in TLS is an answer, whatever it says. Nothing is sent over it, so whose it is does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _ended(host, port, context, host)
    except ssl.SSLError as error:
        return _TO_PLAIN if "ALERT" in (error.reason or "") else ""
    return _TO_PLAIN


async def _of_tls(host: str, port: int, tls: ClientTls) -> str:
    ours = _NOT_OURS if tls.cert is not None else _NO_CERTIFICATE
    try:
        return ours if await _ended(host, port, tls.context(), tls.server_name or host) else ""
    except ssl.SSLCertVerificationError as error:
        return f"the server's certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return _TO_TLS
        return ours if "ALERT" in (error.reason or "") else ""


async def _ended(host: str, port: int, context: ssl.SSLContext, name: str) -> bool:
    """Whether the server hangs up behind the handshake, where a TLS 1.3 server looks at our certificate; gRPC's says no more."""
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    try:
        return not await asyncio.wait_for(reader.read(1), WORD_S)
    except TimeoutError:
        return False
    finally:
        writer.transport.abort()
