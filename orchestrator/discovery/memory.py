"""What is believed of a name's records, answer by answer. Pure.

Rules
1. A record counts from the first answer that has it.
2. One that is missing counts until it is missing from MISSES answers in a row: some servers tell a part of the records at a time, and a
   connection that works is better evidence than an answer.
3. An answer without any record is more likely the resolver's fault than the end of every replica: the last set stands for `keep_s`
   seconds. After that there is none.
4. A failure is no answer: nothing changes, however long it lasts.
"""

from __future__ import annotations

MISSES = 2


class Memory:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._missing: dict[str, int] = {}  # record -> answers in a row that lacked it
        self._empty_since: float | None = None

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._missing)

    def answered(self, records: frozenset[str], now_s: float) -> None:
        if not records:
            self._empty_since = now_s if self._empty_since is None else self._empty_since
            if now_s - self._empty_since >= self._keep_s:
                self._missing.clear()
            return
        self._empty_since = None
        missing = {record: count + 1 for record, count in self._missing.items() if record not in records}
        self._missing = dict.fromkeys(records, 0) | {record: count for record, count in missing.items() if count < MISSES}
