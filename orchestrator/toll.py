"""How long a peer that is believed nothing is left unread after each of its messages: it has a share of this process' time and no more.
Pure; time is an argument, seconds of one clock.

What is not read waits at the peer, by HTTP/2's windows, so nothing grows here. A burst is free: who says little is always read at once.
"""

from __future__ import annotations

FAIR, BROKEN = 2.0, 10.0  # time that a second of our work costs: half of ours, a tenth for messages that hold broken items
BURST_S = 0.05  # of debt that nobody waits for
MESSAGE_S, BYTE_S = 1e-4, 5e-9  # what gRPC takes to read a message
MAX_PAUSE_S = 10.0


class Toll:
    def __init__(self) -> None:
        self._debt_s = self._at_s = 0.0

    def pause_s(self, took_s: float, size: int, broken: bool, now_s: float) -> float:
        """`took_s` = our work for a message of `size` bytes that is done now. 0 = read on."""
        work_s = took_s + MESSAGE_S + BYTE_S * size
        self._debt_s = max(0.0, self._debt_s - (now_s - self._at_s)) + work_s * (BROKEN if broken else FAIR)
        self._at_s = now_s
        return 0.0 if self._debt_s < BURST_S else min(self._debt_s - work_s, MAX_PAUSE_S)
