"""Faults, in one short tree. An expected outcome (no room, a stale round, a lost prefix) is a message, not an error.

SpecdecError
├── InvalidRequest      the caller's input; names the field and the remedy       INVALID_ARGUMENT
├── Unsupported         a legal field this build does not serve; names it        UNIMPLEMENTED
├── Unauthenticated     no token, or one that nobody here knows                  UNAUTHENTICATED
├── PermissionDenied    a caller who may not call this service                   PERMISSION_DENIED
├── NotFound            a model or request that is not here                      NOT_FOUND
├── AlreadyExists       a live request id used twice                             ALREADY_EXISTS
├── Overloaded          no room now; says when to come back                      RESOURCE_EXHAUSTED
├── Mismatch            servers that cannot work together                        FAILED_PRECONDITION
├── Unavailable         no target; says what was produced                        UNAVAILABLE
├── DeadlineExceeded    time ran out                                             DEADLINE_EXCEEDED
└── InternalFault       a defect or a broken model                               INTERNAL
    ├── NonFinite       a row of logits is not finite: that session fails alone
    ├── EngineFault     the engine cannot go on
    └── ProtocolFault   a peer or a state machine broke the rules
"""

from __future__ import annotations

from typing import ClassVar


class SpecdecError(Exception):
    """Root of all faults raised by specdec. `code` is the number of the gRPC status code it travels as."""

    code: ClassVar[int] = 2


class InvalidRequest(SpecdecError):
    """`field` as in the proto, e.g. `sampling.top_p`; `remedy` says what would be accepted."""

    code: ClassVar[int] = 3

    def __init__(self, field: str, remedy: str) -> None:
        super().__init__(f"{field}: {remedy}")
        self.field, self.remedy = field, remedy


class Unsupported(SpecdecError):
    """`field` is legal in the protocol and not served by this build."""

    code: ClassVar[int] = 12

    def __init__(self, field: str, remedy: str = "not served by this build; leave it unset") -> None:
        super().__init__(f"{field}: {remedy}")
        self.field, self.remedy = field, remedy


class Unauthenticated(SpecdecError):
    """The caller did not show who it is; the message says how to."""

    code: ClassVar[int] = 16


class PermissionDenied(SpecdecError):
    """The caller is known and may not do this."""

    code: ClassVar[int] = 7


class NotFound(SpecdecError):
    """What was named does not exist here."""

    code: ClassVar[int] = 5


class AlreadyExists(SpecdecError):
    """A live request already has this id."""

    code: ClassVar[int] = 6


class Overloaded(SpecdecError):
    """No room now; `retry_after_ms` says when to come back."""

    code: ClassVar[int] = 8

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Mismatch(SpecdecError):
    """Two servers that cannot work together."""

    code: ClassVar[int] = 9


class Unavailable(SpecdecError):
    """Nobody can serve this now. `retry_after_ms` says when to come back, None where that is unknown. `output_tokens` = tokens of the
    answer that were decided and handed on before, resumed ones included: they resume it as output_token_ids; None where none had begun."""

    code: ClassVar[int] = 14

    def __init__(self, message: str, retry_after_ms: int | None = None, output_tokens: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms, self.output_tokens = retry_after_ms, output_tokens


class DeadlineExceeded(SpecdecError):
    """Time ran out."""

    code: ClassVar[int] = 4


class InternalFault(SpecdecError):
    """A defect or a broken model."""

    code: ClassVar[int] = 13


class NonFinite(InternalFault):
    """A row of logits holds NaN or infinity where it must not."""


class EngineFault(InternalFault):
    """The engine cannot go on."""


class ProtocolFault(InternalFault):
    """A peer, or an event fed to a state machine, broke the rules."""


def fault(code: int, message: str) -> SpecdecError:
    """The error a peer reported by status code number and message; fields travel as "field: remedy"."""
    field, separator, remedy = message.partition(": ")
    for named in (InvalidRequest, Unsupported):
        if code == named.code:
            return named(field, remedy) if separator else named("request", message)
    if code == Overloaded.code:
        return Overloaded(message, retry_after_ms=1000)
    for plain in (Unauthenticated, PermissionDenied, NotFound, AlreadyExists, Mismatch, Unavailable, DeadlineExceeded):
        if code == plain.code:
            return plain(message)
    return InternalFault(message)
