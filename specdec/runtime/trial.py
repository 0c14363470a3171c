"""A grammar is tried where it can do no harm: in a process of its own, which may be slow, grow, or crash.

The library's limits are counted in work and cover what happens per row. Compiling has corners that nothing counts: schemas that intersect
many patterns, divisors with many digits, rules that refer to each other a thousand deep. A child process compiles the grammar first, in a
copy of itself with bounds on computing time, memory and stack that the kernel keeps; what is refused there never gets here.

    trial = Trial(folder of the tokenizer)
    trial(grammar)          raises InvalidRequest; may be called from several threads

The child starts with the first grammar and ends when its standard input closes, however this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec.errors import InvalidRequest, Overloaded, SpecdecError
from specdec.grammar import GrammarCompiler
from specdec.terms import Grammar, GrammarForm
from specdec.vocabulary import load_tokenizer

COMPUTING_S = 0.5  # half of what this process may be held up by a compilation
MEMORY_BYTES = 256 << 20  # beyond what the child has
STACK_BYTES = 4 << 20  # half of what threads here have
START_S = 60.0  # longest wait for a child's first answer, on a busy machine
ANSWER_S = 20.0  # and for the others
RETRY_MS = 1000

_VERDICTS = {
    signal.SIGPROF: f"too complex: compiling takes more than {COMPUTING_S:g} s of computing",
    signal.SIGABRT: f"too complex: compiling takes more than {MEMORY_BYTES >> 20} MiB of memory",
    signal.SIGSEGV: "too complex: its parts are nested too deeply",
}


class Trial:
    """`command`: how the child is started, for tests."""

    def __init__(self, tokenizer_dir: str | Path, command: Sequence[str] | None = None) -> None:
        self._command = command or (sys.executable, "-m", "specdec.runtime.trial", str(tokenizer_dir))
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._answered = self._closed = False  # by the present child; for good

    def __call__(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for a grammar that cannot be compiled within the bounds, Overloaded when nobody can tell."""
        line = json.dumps([grammar.form.value, grammar.text, grammar.options]).encode() + b"\n"
        with self._lock:
            answer = self._ask(line) or self._ask(line)  # a child that was killed is replaced once
        if answer is None:
            raise Overloaded("grammars cannot be checked now", RETRY_MS)
        (refusal,) = json.loads(answer)
        if refusal is not None:
            raise InvalidRequest(f"sampling.grammar.{grammar.form.value}", refusal)

    def close(self) -> None:
        """Ends the child, and what waits for it. Later calls raise Overloaded."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> bytes | None:
        """The child's answer; None, and no child, when it does not give one."""
        with contextlib.suppress(OSError):
            child = self._child
            if self._closed:
                return None
            if child is None:
                child = self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._answered = False
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(line)
            child.stdin.flush()
            wait_s = ANSWER_S if self._answered else START_S
            if select.select([child.stdout], [], [], wait_s)[0] and (answer := child.stdout.readline()).endswith(b"\n"):
                self._answered = True
                return answer
        self._end()
        return None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def examined(compile_: Callable[[Grammar], object], grammar: Grammar) -> str | None:
    """What a copy of this process, which must have one thread, dies of when it compiles the grammar; None when it survives. What the
    compiler refuses in words it will refuse again where they are needed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _bound_this_process()
            with contextlib.suppress(SpecdecError):
                compile_(grammar)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _VERDICTS.get(signal.Signals(os.WTERMSIG(status)), "too complex")
    return "too complex" if os.WEXITSTATUS(status) else None


def _bound_this_process() -> None:
    """Bounds that the kernel keeps, by a signal that ends the process; and silence, for a library that writes its last words."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    with contextlib.suppress(OSError):  # where there is no such file, memory is not bounded
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, COMPUTING_S)


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> None:
    """`python -m specdec.runtime.trial FOLDER`: one line of JSON in, one out, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair, and it closes our input
    compiler = GrammarCompiler(load_tokenizer(sys.argv[1]))
    for line in sys.stdin.buffer:
        form, text, options = json.loads(line)
        verdict = examined(compiler.compile, Grammar(GrammarForm(form), text, tuple(options)))
        sys.stdout.write(json.dumps([verdict]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
