"""A name with a record per replica, asked for again and again. The operating system's resolver is used, so names mean what they mean to
everything else on the machine; it tells no time to live, hence the fixed, jittered pace."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator

from orchestrator.discovery.lookup import Lookups
from orchestrator.discovery.memory import Memory
from orchestrator.discovery.names import Name, address
from orchestrator.discovery.source import Endpoint, Trouble

JITTER = 0.2  # share of the pace; all orchestrators of a release start at once
TIMEOUT_S = 5.0  # of one look-up; nothing else waits for it
_GONE = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}  # "there is no such record", said by one who knows


class Dns:
    """Implements Source. Times in seconds; `keep_s` as in Memory."""

    def __init__(self, name: Name, lookups: Lookups, trouble: Trouble, *, poll_s: float, keep_s: float) -> None:
        self._name, self._lookups, self._trouble, self._poll_s = name, lookups, trouble, poll_s
        self._memory = Memory(keep_s)
        self.answered_s: float | None = time.monotonic()

    @property
    def known(self) -> frozenset[Endpoint]:
        pool = self._name.pool_name
        return frozenset(Endpoint(address(record, self._name.port), pool_name=pool) for record in self._memory.known)

    async def changes(self) -> AsyncIterator[frozenset[Endpoint]]:
        told = self.known
        while True:
            await self._ask()
            if self.known != told:
                told = self.known
                yield told
            await asyncio.sleep(self._poll_s * (1 + JITTER * (2 * random.random() - 1)))

    async def _ask(self) -> None:
        host = self._name.host
        try:
            records = await self._lookups.records(host.strip("[]"), self._name.port, TIMEOUT_S)
        except TimeoutError:
            return self._trouble.failed("timeout", f"{host}: no answer in {TIMEOUT_S:g} s")
        except socket.gaierror as error:
            if error.errno not in _GONE:
                return self._trouble.failed("error", f"{host}: {error}")
            records = []
        except (OSError, UnicodeError) as error:
            return self._trouble.failed("error", f"{host}: {error}")
        self.answered_s = time.monotonic()
        if records:
            self._trouble.over()
        else:
            self._trouble.failed("empty", f"{host} has no address")
        self._memory.answered(frozenset(records), asyncio.get_running_loop().time())
