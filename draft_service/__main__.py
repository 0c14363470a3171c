"""`python -m draft_service`: one draft process from SPECDEC_* variables."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from specdec.runtime.early import leave_on_signals
    from specdec.runtime.extras import need_or_leave

    leave_on_signals()
    need_or_leave("model", "draft")

import asyncio
import contextlib
import logging
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draft_service.checks import Limits
from draft_service.choosing import chooser_factory
from draft_service.drafter import Drafter
from draft_service.metrics import Metrics
from draft_service.servicer import DraftServicer, beats
from draft_service.settings import Settings
from draft_service.stepper import Stepper
from draft_service.tracing import Tracing
from draft_service.worker import Worker
from specdec.engine import EngineConfig, EngineInfo, EngineThread, KvBudget, load_engine
from specdec.errors import Mismatch
from specdec.grammar import GrammarCompiler
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.session_spans import SessionSpans, step_age_s
from specdec.terms import ModelInfo
from specdec.vocabulary import Vocabulary, describe, load_tokenizer

log = logging.getLogger("draft")


async def build(settings: Settings, runtime: Runtime, thread: EngineThread | None = None) -> Service:
    thread = thread or EngineThread("draft-engine")
    (words, grammars), engine = await asyncio.gather(
        asyncio.to_thread(_words, settings.model),
        thread.run(load_engine, _engine_config(settings)),
    )
    info: EngineInfo = engine.info
    check_draft_ids(info, words)
    limits = Limits(
        vocab_size=words.size,
        window=info.window,
        eos_ids=words.eos_ids,
        max_sessions=settings.max_sessions,
        max_block=settings.max_num_speculative_tokens,
        max_budget=settings.budget_tokens,
        step_rows=settings.max_step_rows,
        lookahead_floor=settings.lookahead_floor,
        fanout=settings.speculative_fanout,
        branch_floor=settings.branch_floor,
    )
    room = KvBudget(info.kv_total_tokens)
    compilers = ThreadPoolExecutor(1, "grammars")
    guessing = settings.speculative_fanout > 1
    choosers = chooser_factory(words.size, words.eos_ids, info.draft_ids, grammars, compilers.submit, guessing)
    drafter = Drafter(limits, room, choosers)
    tracing = Tracing(SessionSpans(runtime.telemetry, "draft"))
    metrics = Metrics(runtime.telemetry, drafter, tracing)
    runtime.telemetry.gauge("specdec.step.age", lambda: step_age_s(thread.running_since))
    runtime.telemetry.gauge("specdec.memory", lambda: [(size, {"kind": kind}) for kind, size in engine.memory.items()])

    def alive() -> bool:
        return thread.alive(settings.hung_step_ms / 1000)

    worker = Worker(drafter, Stepper(engine), thread, metrics, settings.scaling_smoothing_ms / 1000, lambda: not alive())
    tasks = [
        asyncio.create_task(worker.run(), name="draft-worker"),
        asyncio.create_task(beats(worker, metrics), name="draft-beats"),
    ]
    for task in tasks:
        task.add_done_callback(lambda done: _ended(done, runtime))
    servicer = DraftServicer(worker, model_info(settings, info, words), tracing)

    async def close() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        compilers.shutdown(wait=False, cancel_futures=True)
        thread.close(wait=False)
        tracing.end()

    return Service(add=servicer.add_to, draining=worker.draining, drain=worker.drain, close=close, alive=alive)


def _words(model: Path) -> tuple[Vocabulary, GrammarCompiler]:
    tokenizer = load_tokenizer(model)
    return describe(tokenizer, model), GrammarCompiler(tokenizer)


def check_draft_ids(info: EngineInfo, words: Vocabulary) -> None:
    """Raises Mismatch when the head does not fit the tokenizer."""
    if info.draft_ids is None and info.vocab_size < words.size:
        raise Mismatch(f"the head has {info.vocab_size} rows, the tokenizer {words.size} ids")
    if info.draft_ids is not None and max(info.draft_ids) >= words.size:
        raise Mismatch(f"the draft vocabulary names id {max(info.draft_ids)}, the tokenizer has {words.size} ids")


def model_info(settings: Settings, info: EngineInfo, words: Vocabulary) -> ModelInfo:
    return ModelInfo(
        model=settings.model.name,
        vocab_size=words.size,
        vocabulary_fingerprint=words.fingerprint,
        eos_token_ids=words.eos_ids,
        max_model_len=info.window,
        boot_id=secrets.token_hex(8),
        numerics_fingerprint=info.numerics_fingerprint,
        batch_invariant=info.batch_invariant,
        dtype=info.dtype,
        kv_total_tokens=info.kv_total_tokens,
        max_num_speculative_tokens=settings.max_num_speculative_tokens,
        max_sessions=settings.max_sessions,
        model_fingerprint=info.model_fingerprint,
    )


def _engine_config(settings: Settings) -> EngineConfig:
    return EngineConfig(
        model_dir=settings.model,
        dtype=settings.dtype,
        path=settings.engine_path,
        simulated=settings.sim,
        device=settings.device,
        kv_tokens=settings.kv_tokens,
        threads=settings.threads,
        reduced_head=True,
        self_test=settings.self_test,
        max_rows=max(settings.max_step_rows, 128),  # the self-test feeds more at once than a step may
    )


def _ended(task: asyncio.Task[None], runtime: Runtime) -> None:
    """A loop that ends by itself takes the process with it: a draft that drafts nothing must not look alive."""
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        log.error("%s ended", task.get_name(), exc_info=error)
        runtime.fail(f"{task.get_name()} ended: {error}")


def main() -> int:
    thread = EngineThread("draft-engine")
    return thread.leave(serve("draft", Settings, lambda settings, runtime: build(settings, runtime, thread)))


if __name__ == "__main__":
    sys.exit(main())
