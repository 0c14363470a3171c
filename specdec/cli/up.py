"""`specdec up`: targets, drafts and an orchestrator on this machine, until Ctrl-C or `specdec down`."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.bench.system import default_pins, own_cpus
from specdec.cli import authority, system
from specdec.cli.keeper import Keeper
from specdec.cli.pids import identify
from specdec.cli.state import TLS, ProcessEntry, State
from specdec.cli.supervisor import START_TIMEOUT_S, Child, Interrupted, Supervisor, tail
from specdec.cli.system import HOST, System, parse_pins
from specdec.errors import InvalidRequest, Unavailable
from specdec.runtime.settings import SettingsError, from_environment

HELP = "start targets, drafts and an orchestrator on this machine"
LOG = "up.log"
DAEMON = (sys.executable, "-m", "specdec.cli.main")
DESCRIPTION = """\
Starts N targets, M drafts and one orchestrator as processes on loopback ports and prints a ready line when they serve. Settings that have
no flag come from SPECDEC_* variables, e.g. SPECDEC_DTYPE=float32. A process that ends later is started again on its port, at growing
intervals; one that does not stay up ends the system. Ctrl-C, `specdec down`, or the end of this process ends all of them. With --tls the
openssl program makes an authority for this system alone; commands with the same --state show its certificates."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system.add_arguments(parser)
    parser.add_argument("--targets", type=int, default=1, metavar="N", help="target processes (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=1, metavar="M", help="draft processes, 0 = no speculation (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port of the orchestrator (default: any free one)")
    pin = "CPUs per role, e.g. target=0,draft=1,orchestrator=1; '' = none (default: as shown for one target and one draft on two CPUs)"
    parser.add_argument("--pin", metavar="ROLE=CPU,…", help=pin)
    parser.add_argument("--detach", action="store_true", help="return when the system serves; needs --state")
    parser.add_argument("--state", type=Path, metavar="DIR", help="folder for endpoint, processes.json and logs")
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all of them, with an authority of its own; needs --state")
    parser.add_argument("--no-restart", action="store_true", help="a process that ends is told of, and the others go on without it")
    parser.add_argument("--report-fd", type=int, default=-1, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    chosen = System(
        target_model=arguments.target_model.absolute(),
        draft_model=arguments.draft_model.absolute(),
        targets=_count("--targets", arguments.targets, 1),
        drafts=_count("--drafts", arguments.drafts, 0),
        num_speculative_tokens=arguments.num_speculative_tokens,
        speculative_fanout=arguments.speculative_fanout,
        port=arguments.port,
        pins=_pins(arguments),
        tls=arguments.state.absolute() / TLS if arguments.tls and arguments.state else None,
    )
    if arguments.tls and chosen.tls is None:
        raise InvalidRequest("--tls", "needs --state DIR, where the certificates will be")
    chosen.check()
    _check_port(arguments.port)
    state = None if arguments.state is None else State(arguments.state.absolute())
    if arguments.detach:
        if state is None:
            raise InvalidRequest("--detach", "needs --state DIR, where the endpoint and the logs will be")
        return _detach(state, arguments.argv)
    if state is not None and arguments.report_fd < 0:  # else the folder was taken for us by who started us
        with state.free():
            state.take(identify(os.getpid()))
    return _supervise(chosen, state, not arguments.no_restart, arguments.report_fd)


def _pins(arguments: argparse.Namespace) -> dict[str, str]:
    """Two processes that take turns on both of two cores are never ready for each other. With more there is room for everybody."""
    cpus = own_cpus()
    if arguments.pin is not None:
        pins = parse_pins(arguments.pin)
        for role, wanted in pins.items():
            if cpus and not set(map(int, wanted.split(","))) <= set(cpus):
                raise InvalidRequest("--pin", f"{role}={wanted}: this process may use CPU {', '.join(map(str, cpus))}")
        return pins
    alone = arguments.targets == arguments.drafts == 1 and len(cpus) == 2
    return default_pins(cpus) if alone and not from_environment("SPECDEC_CPU_AFFINITY") else {}


def _count(flag: str, value: int, low: int) -> int:
    if not low <= value <= 64:
        raise InvalidRequest(flag, f"must be {low} to 64")
    return value


def _check_port(port: int) -> None:
    """Before models are loaded for minutes. Raises InvalidRequest."""
    if not 0 <= port <= 65535:
        raise InvalidRequest("--port", "must be 0 to 65535, 0 = any free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InvalidRequest("--port", f"{port}: {error.strerror or error}; choose another one, or 0 for any free one") from error


def _supervise(chosen: System, state: State | None, restart: bool, report_fd: int) -> int:
    try:
        if chosen.tls is not None:
            authority.make(chosen.tls)
        with _log_folder(state) as logs, Supervisor(logs, tell) as supervisor:
            return _start_and_keep(supervisor, chosen, state, restart, report_fd)
    finally:
        if state is not None:
            state.clear()


def _start_and_keep(supervisor: Supervisor, chosen: System, state: State | None, restart: bool, report_fd: int) -> int:
    try:
        pinned = "".join(f"; {role} on CPU {cpu}" for role, cpu in chosen.pins.items())
        tell(f"starting {chosen.targets} target(s), {chosen.drafts} draft(s){pinned}; loading the models takes some seconds")
        children = chosen.start(supervisor)
    except Interrupted:
        tell("stopping; it did not serve yet")
        return 130
    except (Unavailable, SettingsError) as error:
        if report_fd >= 0:
            _report(report_fd, f"error {error}")
        raise
    endpoint = children[-1].endpoint

    def write(present: Sequence[Child]) -> None:
        if state is not None:
            entries = [ProcessEntry(c.plan.role, c.process.pid, c.port, c.metrics_port) for c in present]
            state.write(endpoint, entries, identify(os.getpid()), [c.identity for c in present])

    try:
        write(children)
        print(f"ready role=system endpoint={endpoint} pid={os.getpid()}", flush=True)
        if report_fd >= 0:
            _report(report_fd, f"ready {endpoint}")
        return Keeper(supervisor, children, tell, write, restart).run()
    finally:
        if state is not None:
            state.unserved()


def _detach(state: State, argv: list[str]) -> int:
    """Runs this very command again as a daemon in a session of its own and waits for its word."""
    read_end, write_end = os.pipe()
    flags = [flag for flag in argv if flag != "--detach"]
    log_path = state.folder / LOG
    with state.free(), log_path.open("wb") as log:
        daemon = subprocess.Popen(
            [*DAEMON, *flags, "--report-fd", str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        state.take(identify(daemon.pid))
    os.close(write_end)
    tell(f"starting in the background; {log_path} says how far it is")
    try:
        with os.fdopen(read_end) as words:
            word = words.read()  # to end-of-file: the daemon closes its end once it has spoken, or dies
    except KeyboardInterrupt:  # it is in a session of its own, where Ctrl-C does not reach it
        daemon.terminate()
        daemon.wait(START_TIMEOUT_S)
        state.clear()  # a daemon that was ended before it listened to signals could not
        raise
    if word.startswith("ready "):
        print(f"ready role=system endpoint={word.split()[1]} pid={daemon.pid}", flush=True)
        daemon.returncode = 0  # it outlives us on purpose; without this Popen warns about a child left behind
        return 0
    daemon.wait(START_TIMEOUT_S)
    state.clear()
    raise Unavailable(word.removeprefix("error ").strip() or f"the system did not start:\n{tail(log_path)}")


def _report(descriptor: int, word: str) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "w") as words:
        words.write(word)


@contextlib.contextmanager
def _log_folder(state: State | None) -> Iterator[Path]:
    if state is not None:
        yield state.folder
        return
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        yield Path(folder)


def tell(text: str) -> None:
    """For whoever listens: a terminal that is gone, or a reader of a pipe, ends nothing that runs."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
