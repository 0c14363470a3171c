"""`make bench-peers`: this system and its peers on the same two cores, with the same prompts and weights, one after the other.

Every peer has an environment of its own under .peers/; what cannot be installed is left out with a note. A round runs every contender once,
every second round in the opposite order. There are as many rounds as fit into --minutes, the first one always; installs and first
compilations come before them. Every finished run is kept, so an interrupted measurement goes on where it was; --fresh begins anew, and so
does the next one after a complete one. Then docs/benchmarks.md is written. Standard error of the runs goes to .peers/bench.log.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from peer_catalogue import (
    CONTENDERS,
    CORES,
    DRAFT,
    DRAFT_GGUF,
    ENVIRONMENTS,
    FILES,
    OURS,
    PEERS,
    PROMPTS,
    ROOT,
    TARGET,
    TARGET_GGUF,
    Contender,
    Environment,
    command,
)
from peer_page import BUSY, Found, page
from prepare_models import fetch_gguf
from registry import SetupFailed, run_pip

PAGE = Path("docs/benchmarks.md")
LOG = PEERS / "bench.log"
RESULTS = PEERS / "results"
SETTINGS, COMPLETE = RESULTS / "settings.json", RESULTS / "complete"
STAMP = ".installed"
RUN_S = 420  # the longest that one run may take
COMPILE_S, COMPILE_TOKENS = 1500, 4
TAIL = 300


def main() -> int:
    options = _options()
    load = os.getloadavg()[0]  # of others: nothing of ours has run yet
    os.chdir(ROOT)
    PEERS.mkdir(exist_ok=True)
    chosen = [c for c in CONTENDERS if not options.only or c.key in options.only]
    settings = {"max_tokens": options.max_tokens, "streams": options.streams, "only": sorted(options.only), "code": _digest()}
    with LOG.open("a") as log:
        reasons = {c.key: reason for c in chosen if (reason := _prepared(c.environment, log))}
        write_prompts()
        _resume_or_begin(settings, options.fresh, load)
        if CORES:
            os.sched_setaffinity(0, CORES)  # what runs from here on inherits it
        chosen = [c for c in chosen if c.key not in reasons]
        for c in chosen:
            compile_once(c, options, log)
        measure(chosen, options, log)
    COMPLETE.touch()
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("round-*.json"))]
    runs += [{"key": key, "round": 0, "failed": reason} for key, reason in reasons.items()]
    write_page(runs, options)
    return 0


def _options() -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--max-tokens", type=int, default=96, help="tokens an answer (default: %(default)s)")
    flags.add_argument("--streams", default="1,4,8", help="default: %(default)s")
    flags.add_argument("--rounds", type=int, default=3, help="at most (default: %(default)s)")
    flags.add_argument("--minutes", type=float, default=23.0, help="for all rounds, installs apart (default: %(default)s)")
    flags.add_argument("--only", nargs="*", default=[], metavar="KEY", choices=[c.key for c in CONTENDERS], help="these contenders alone")
    flags.add_argument("--fresh", action="store_true", help="forget the runs of an interrupted measurement")
    flags.add_argument("--page", type=Path, default=PAGE, help="what is written (default: %(default)s)")
    return flags.parse_args()


# ---------------------------------------------------------------- what the runs need


def _prepared(name: str, log: TextIO) -> str:
    """Empty when the environment and its files are there; else why not."""
    try:
        install(ENVIRONMENTS[name], log)
        if name == "llama":
            write_gguf_files(log)
    except (SetupFailed, subprocess.SubprocessError, OSError) as error:
        reason = f"it could not be installed ({str(error).strip().splitlines()[0]})"
        print(f"{name}: {reason}", file=log, flush=True)
        print(f"{name}: {reason}", flush=True)
        return reason
    return ""


def install(environment: Environment, log: TextIO) -> None:
    """Costs nothing when it is there as its pins say. Raises SetupFailed."""
    if environment.name == OURS:
        return
    key = json.dumps([environment.pins, environment.remove, sys.version])
    stamp = environment.folder / STAMP
    if stamp.is_file() and stamp.read_text() == key:
        return
    print(f"installing {', '.join(environment.pins)} into {environment.folder}", flush=True)
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", environment.folder], check=True, stdout=log, stderr=log)
    run_pip(environment.python, ["install", *environment.pins], environment.name)
    if environment.remove:
        run_pip(environment.python, ["uninstall", "--yes", *environment.remove], environment.name)
    stamp.write_text(key)


def write_gguf_files(log: TextIO) -> None:
    FILES.mkdir(parents=True, exist_ok=True)
    if not TARGET_GGUF.is_file():
        scratch = FILES / ".fetch"
        shutil.rmtree(scratch, ignore_errors=True)
        fetch_gguf(scratch).rename(TARGET_GGUF)
        shutil.rmtree(scratch)
    if not DRAFT_GGUF.is_file():
        script = [sys.executable, "tools/peers/draft_gguf.py", "--draft", str(DRAFT), "--target-gguf", str(TARGET_GGUF)]
        subprocess.run([*script, "--out", str(DRAFT_GGUF)], check=True, stdout=log, stderr=log)


def write_prompts() -> None:
    """The built-in prompts with the ids that the chat template gives them: everyone is asked the same ids."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    FILES.mkdir(parents=True, exist_ok=True)
    entries = [json.loads(line) for line in Path("specdec/bench/prompts.jsonl").read_text().splitlines() if line.strip()]
    for entry in entries:
        chat = [{"role": "user", "content": entry["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        entry["token_ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
    PROMPTS.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def compile_once(contender: Contender, options: argparse.Namespace, log: TextIO) -> None:
    """Fills the cache of one that compiles at its first start, as an install would. A failure shows again in the round."""
    stamp = PEERS / "cache" / f"{contender.key}-{_digest()}"
    if not contender.compiles or stamp.is_file():
        return
    print(f"first start of {contender.key}, which compiles", flush=True)
    # The same number of streams: the shapes that are compiled depend on it.
    stamp.parent.mkdir(exist_ok=True)
    if "cells" in _report_of(command(contender, COMPILE_TOKENS, options.streams), log, COMPILE_S):
        stamp.touch()


# ---------------------------------------------------------------- rounds


def _digest() -> str:
    """Of the scripts: runs of other ones are not gone on with."""
    state = hashlib.sha256()
    for path in (Path("tools/peer_catalogue.py"), *sorted(Path("tools/peers").glob("*.py"))):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _resume_or_begin(settings: dict[str, Any], fresh: bool, load: float) -> None:
    same = SETTINGS.is_file() and json.loads(SETTINGS.read_text())["settings"] == settings
    if fresh or COMPLETE.exists() or not same:
        shutil.rmtree(RESULTS, ignore_errors=True)
        RESULTS.mkdir()
        SETTINGS.write_text(json.dumps({"settings": settings, "load": load}))
    elif any(RESULTS.glob("round-*.json")):
        print("going on with the measurement that was interrupted", flush=True)


def measure(contenders: Sequence[Contender], options: argparse.Namespace, log: TextIO) -> None:
    began, longest, out = time.monotonic(), 0.0, set[str]()
    for number in range(options.rounds):
        if number and time.monotonic() - began + longest > 60 * options.minutes:
            print(f"{options.minutes:g} minutes: no time for round {number + 1}", flush=True)
            return
        round_began = time.monotonic()
        for c in contenders if number % 2 == 0 else list(reversed(contenders)):
            if c.key in out:
                continue
            result = one_run(c, number, options, log)
            if "cells" not in result:
                out.add(c.key)
        longest = max(longest, time.monotonic() - round_began)


def one_run(contender: Contender, number: int, options: argparse.Namespace, log: TextIO) -> dict[str, Any]:
    path = RESULTS / f"round-{number:02}-{contender.key}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    began = time.monotonic()
    words = command(contender, options.max_tokens, options.streams)
    print(f"\n==== round {number + 1}, {contender.key}: {' '.join(words)}", file=log, flush=True)
    result = {"key": contender.key, "round": number, **_report_of(words, log, RUN_S), "took_s": round(time.monotonic() - began, 1)}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(path)
    print(f"round {number + 1}  {contender.key:24} {result['took_s']:6.1f} s  {_in_short(result)}", flush=True)
    return result


def _report_of(words: Sequence[str], log: TextIO, limit_s: float) -> dict[str, Any]:
    """What it reports on its standard output, or why it does not. It runs in a group of its own, which is ended with it."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"it was not done after {limit_s:g} s"}
        finally:
            _end_group(process)
    log.write(output + "\n")
    report = _last_object(output) if process.returncode == 0 else {}
    return report or {"failed": f"it ended with {process.returncode}; {LOG} tells more"}


def _last_object(output: str) -> dict[str, Any]:
    """A library may have a last word behind the report."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    process.wait()


def _in_short(result: dict[str, Any]) -> str:
    if "cells" not in result:
        return str(result.get("skipped") or result["failed"])[:TAIL]
    return ", ".join(f"{cell['streams']}: {cell['tokens'] / cell['seconds']:.1f} tokens/s" for cell in result["cells"])


def write_page(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from specdec.bench.machine import machine, versions

    load = json.loads(SETTINGS.read_text())["load"]
    about = {"machine": machine(), "python": versions(())["python"], "max_tokens": options.max_tokens, "load": load}
    found = Found(runs, [int(part) for part in options.streams.split(",")])
    options.page.write_text(page(PAGE.read_text(), found, about))
    if load > BUSY:
        print(f"the load average was {load:.1f} when it began: others were at work, and the figures mean little", flush=True)
    print(f"{options.page} is written", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")
