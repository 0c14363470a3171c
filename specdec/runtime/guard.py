"""Who may call, and how much: tokens, the names in callers' certificates, limits per caller. Told of each call by the interceptor.

A caller is known by its token's name, else by its certificate, else by its address. Refusals name the setting and the remedy and are
counted; tokens are never repeated, nor are they labels or log fields.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from specdec.errors import Overloaded, PermissionDenied, Unauthenticated
from specdec.runtime.limits import Limits
from specdec.runtime.telemetry import Telemetry
from specdec.runtime.tokens import Tokens
from specdec.runtime.watched import Watched

MAX_SHOWN = 8  # names of a certificate in a refusal
IPV6_CLIENT_BITS = 64  # whoever has one address of such a network has all of them


class Guard:
    """`identities` empty = any certificate; `tokens` None = none asked for; `limits` None = none."""

    def __init__(
        self,
        telemetry: Telemetry,
        identities: Sequence[str] = (),
        tokens: Watched[Tokens] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._identities, self._tokens, self._limits = frozenset(identities), tokens, limits
        self._refused = telemetry.counter("specdec.calls.refused")

    def token_owner(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Before anything of the request is read. Empty where no token is asked for. Raises Unauthenticated."""
        if self._tokens is None:
            return ""
        try:
            return self._tokens.value.owner(metadata)
        except Unauthenticated:
            self._refused.add(reason="token")
            raise

    def enter(self, context: Any, owner: str) -> Callable[[], None]:
        """A call begins. What is returned ends it: what it takes of its client's limits it keeps until its status is out. Raises
        PermissionDenied and Overloaded."""
        names: tuple[str, ...] = ()
        if self._identities or (self._limits is not None and not owner):
            names = names_of(context.auth_context())
        if self._identities and not self._identities.intersection(names):
            shown = ", ".join(names[:MAX_SHOWN]) or "none"
            self._refused.add(reason="identity")
            raise PermissionDenied(f"certificate: its names ({shown}) are not among SPECDEC_ALLOWED_IDENTITIES of this service")
        if self._limits is None:
            return _nothing
        who = f"token {owner}" if owner else f"certificate {names[0]}" if names else f"address {address_of(context.peer())}"
        try:
            self._limits.enter(who, time.monotonic())
        except Overloaded:
            self._refused.add(reason="limit")
            raise
        return partial(self._limits.leave, who)


def _nothing() -> None:
    """Ends a call that took nothing."""


def names_of(auth: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """DNS names and URIs of the caller's verified certificate; none without one. The common name is no identity (RFC 6125 §6.4.4)."""
    found = (*auth.get("peer_dns", ()), *auth.get("peer_uri", ()))
    return tuple(name.decode("utf-8", "replace") for name in found)


def address_of(peer: str) -> str:
    """gRPC's name of a peer (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`, `unix:…`) without its port; an IPv6 address stands for its network."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if address.version == 6 and not address.ipv4_mapped:
        return str(ipaddress.ip_network((host, IPV6_CLIENT_BITS), strict=False))
    return str(address.ipv4_mapped or address) if address.version == 6 else str(address)
