"""`make soak MINUTES=20`: the whole system under everything at once, for as long as you like.

Two of each service with tiny models in float64, a proxy on every hop. Clients ask for every parameter there is, leave, read slowly and come
in crowds, while connections break at every phase of a round and processes are killed, stopped and started again. In the end: every answer
was the one without speculation and without faults, no process holds a session, and the memory and descriptors of the processes that lived
through it did not grow. Ctrl-C ends it early and tells what was seen so far. Exit code: 0 = all of that held, 1 = not, 130 = interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.e2e.fault_driver import watched
from tests.e2e.fault_phases import CLIENT, DRAFT, TARGET, Trigger
from tests.e2e.levels import Levels
from tests.e2e.network import Link
from tests.e2e.soak_clients import Clients, questions
from tests.e2e.soak_trouble import Trouble
from tests.e2e.stack import Process, Stack, wait_ready
from tests.tiny import save_tiny

LANES = 8
TELL_EVERY_S = 30.0  # where no line can be rewritten
READ_EVERY_S = 2.0
WARM_UP = 0.3  # of the time: what is read before it is no yardstick
MOST_DESCRIPTORS, MOST_MEMORY_MB = 12.0, 32.0  # that the slope behind the warm-up may add up to
LEFT_S = 45.0  # what a half-open connection or a lease may hold: keepalive is 40 s
WAIT_S = 120.0  # for the last answers
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
FULL = {"MAX_RUNNING": "48", "MAX_WAITING": "64", "STEP_DEADLINE_MS": "5000", "MAX_EJECTION_MS": "3000"}
CLEAR_LINE = "\r\x1b[K"


@dataclass
class Soak:
    minutes: float
    seed: int
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False

    async def run(self, folder: Path) -> int:
        async with self._running(folder) as (stack, links, names):
            witnesses = {one.role: one for one in (stack.targets[0], stack.drafts[0], stack.orchestrators[0])}
            levels = Levels({role: one.popen.pid for role, one in witnesses.items()})
            clients = Clients(names, questions(stack.target_model), self.seed)
            print(f"{len(clients.asked)} questions are asked without faults first", flush=True)
            await clients.learn(stack.orchestrators[0].endpoint)
            trouble = Trouble(stack, links, random.Random(self.seed))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._interrupt, trouble)
            await self._turmoil(clients, trouble, levels)
            await self._nothing_left(stack)
            levels.read()
            self._judge(clients, levels, stack)
            self._summary(clients, trouble, levels)
        return 130 if self.interrupted and not self.problems else int(bool(self.problems))

    def _interrupt(self, trouble: Trouble) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        trouble.over.set()

    @contextlib.asynccontextmanager
    async def _running(self, folder: Path) -> AsyncIterator[tuple[Stack, list[tuple[str, Link, Trigger]], list[str]]]:
        model = save_tiny(folder / "tiny", seed=0)
        stack = Stack(folder, model, model, FLOAT64 | {"LEASE_MS": "1000"}, FLOAT64)
        async with contextlib.AsyncExitStack() as exit:
            exit.callback(stack.stop)
            for _ in range(2):
                stack.begin_target()
                stack.begin_draft()
            for process in (*stack.targets, *stack.drafts):
                await asyncio.to_thread(wait_ready, process)
            hops = [(TARGET, process) for process in stack.targets] + [(DRAFT, process) for process in stack.drafts]
            links = [(kind, *watched(process.endpoint, kind)) for kind, process in hops]
            names = [await exit.enter_async_context(link.serving()) for _, link, _ in links]
            stack.orchestrator_settings = {**FULL, "TARGETS": ",".join(names[:2]), "DRAFTS": ",".join(names[2:])}
            for _ in range(2):
                await asyncio.to_thread(stack.add_orchestrator)
            fronts = [(CLIENT, *watched(process.endpoint, CLIENT)) for process in stack.orchestrators]
            fronts_names = [await exit.enter_async_context(link.serving()) for _, link, _ in fronts]
            yield stack, links + fronts, fronts_names

    async def _turmoil(self, clients: Clients, trouble: Trouble, levels: Levels) -> None:
        asking = [asyncio.create_task(role) for role in clients.roles(LANES)]
        harming = [asyncio.create_task(role) for role in trouble.roles()]
        try:
            await self._watch(clients, trouble, levels, [*asking, *harming])
            trouble.over.set()
            await asyncio.gather(*harming)
            trouble.clear()
            clients.over.set()
            await asyncio.wait_for(asyncio.gather(*asking), WAIT_S)
        except TimeoutError:
            self.problems.append(f"answers were still going on {WAIT_S:g} s after the last fault")
        finally:
            for task in (*asking, *harming):
                task.cancel()
            await asyncio.gather(*asking, *harming, return_exceptions=True)

    async def _watch(self, clients: Clients, trouble: Trouble, levels: Levels, tasks: Sequence[asyncio.Task[None]]) -> None:
        begun, told = time.monotonic(), 0.0
        while (passed := time.monotonic() - begun) < 60 * self.minutes and not trouble.over.is_set():
            levels.read()
            for task in tasks:
                if task.done():
                    task.result()
            if sys.stdout.isatty() or passed - told >= TELL_EVERY_S:
                told = passed
                self._tell(passed, clients, trouble, levels)
            await asyncio.sleep(READ_EVERY_S)

    def _tell(self, passed: float, clients: Clients, trouble: Trouble, levels: Levels) -> None:
        total = 60 * self.minutes
        filled = int(24 * passed / total)
        tally = clients.tally
        line = (
            f"[{'#' * filled}{'.' * (24 - filled)}] {clock(passed)}, {clock(total - passed)} left: {tally.outcomes['answered']} answers, "
            f"{len(tally.wrong)} wrong, {trouble.faults} faults, {trouble.done['kill']} kills; "
            + " ".join(f"{role} {seen[-1].memory_mb:.0f} MB {seen[-1].descriptors} fd" for role, seen in levels.seen.items())
        )
        print(f"{CLEAR_LINE}{line[:140]}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)

    # --- afterwards ---------------------------------------------------------------------------------------------------

    async def _nothing_left(self, stack: Stack) -> None:
        """Gauges of every process."""
        deadline = time.monotonic() + LEFT_S
        while left := await asyncio.to_thread(held, stack):
            if time.monotonic() > deadline:
                self.problems += left
                return
            await asyncio.sleep(0.5)

    def _judge(self, clients: Clients, levels: Levels, stack: Stack) -> None:
        self.problems += clients.tally.wrong
        self.problems += stack.defects()
        for process in (stack.targets[0], stack.drafts[0], stack.orchestrators[0]):
            if process.popen.poll() is not None:
                self.problems.append(f"the {process.role} that nobody killed ended with {process.popen.poll()}:\n{process.log_tail(10)}")
        for role, seen in levels.seen.items():
            levels.seen[role] = seen[int(WARM_UP * len(seen)) :]
            minutes = (levels.seen[role][-1].at_s - levels.seen[role][0].at_s) / 60
            descriptors, memory = (minutes * slope for slope in levels.slopes(role))
            if descriptors > MOST_DESCRIPTORS or memory > MOST_MEMORY_MB:
                self.problems.append(f"the {role} grows: {descriptors:+.0f} descriptors and {memory:+.0f} MB in {minutes:.1f} minutes")

    def _summary(self, clients: Clients, trouble: Trouble, levels: Levels) -> None:
        print(CLEAR_LINE if sys.stdout.isatty() else "", end="")
        print("answers  " + ", ".join(f"{count} {what}" for what, count in clients.tally.outcomes.most_common()))
        print("trouble  " + ", ".join(f"{count} {what}" for what, count in trouble.done.most_common()))
        for role, seen in levels.seen.items():
            descriptors, memory = levels.slopes(role)
            print(
                f"{role:12} {seen[-1].memory_mb:.0f} MB ({memory:+.2f} a minute), {seen[-1].descriptors} descriptors ({descriptors:+.2f})"
            )
        for problem in self.problems[:20]:
            print("PROBLEM  " + problem[:1000])
        verdict = f"{len(self.problems)} problems" if self.problems else "no wrong token, nothing left, level"
        print(("interrupted; " if self.interrupted else "") + verdict)


def held(stack: Stack) -> list[str]:
    """Processes whose gauges are not 0."""
    found = [gauge(process, "specdec_sessions") for process in (*stack.targets, *stack.drafts)]
    for name in ("specdec_requests_running", "specdec_requests_waiting"):
        found += [gauge(process, name) for process in stack.orchestrators]
    return [one for one in found if one]


def gauge(process: Process, name: str) -> str:
    """What it holds, in words; empty = nothing."""
    value = process.metric(name)
    return f"{process.role} {process.endpoint}: {name} is {value:g}" if value else ""


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the order of trouble")
    args = parser.parse_args()
    print(f"soak: {args.minutes:g} minutes, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="specdec-soak-") as folder:
        return asyncio.run(Soak(args.minutes, args.seed).run(Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
