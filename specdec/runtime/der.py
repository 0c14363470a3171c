"""The two dates of a certificate, from its DER bytes (RFC 5280 §4.1). The standard library tells only those of verified peers."""

from __future__ import annotations

import calendar
from collections.abc import Iterator

_EXPLICIT_0, _UTC_TIME = 0xA0, 0x17


def validity(der: bytes) -> tuple[int, int]:
    """First and last second, as Unix time. Raises ValueError for what is no certificate."""
    try:
        (certificate,) = (content for _, content in _items(der))
        to_be_signed = next(_items(certificate))[1]
        fields = list(_items(to_be_signed))
        if fields[0][0] == _EXPLICIT_0:  # the version, left out by version 1
            del fields[0]
        first, last = _items(fields[3][1])  # serial number, signature algorithm, issuer, validity
        return _seconds(*first), _seconds(*last)
    except (IndexError, StopIteration) as error:
        raise ValueError("not a certificate") from error


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element that stands in a row."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        if at + length > len(data):
            raise ValueError("not a certificate: cut short")
        yield tag, data[at : at + length]
        at += length


def _seconds(tag: int, content: bytes) -> int:
    """YYMMDDHHMMSSZ before 2050, YYYYMMDDHHMMSSZ from then on."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    parts = [int(text[:4]), *(int(text[i : i + 2]) for i in range(4, 14, 2))]
    return calendar.timegm((*parts, 0, 0, 0))
