"""`python -m target_service`: one target process, configured by SPECDEC_* variables (settings.py)."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from specdec.runtime.early import leave_on_signals
    from specdec.runtime.extras import need_or_leave

    leave_on_signals()
    need_or_leave("model", "target")

import asyncio
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from specdec.engine import BLOCK_TOKENS, Engine, EngineConfig, EngineThread, KvBudget, load_engine
from specdec.errors import InvalidRequest, Mismatch
from specdec.grammar import Constraint, GrammarCompiler
from specdec.runtime.server import Runtime, Service, serve
from specdec.runtime.session_spans import SessionSpans, step_age_s
from specdec.terms import ModelInfo
from specdec.vocabulary import Vocabulary, describe, load_tokenizer
from target_service.checks import Limits
from target_service.executor import Executor
from target_service.loop import EngineLoop
from target_service.observer import StepObserver
from target_service.plan import Compile
from target_service.servicer import TargetServicer
from target_service.settings import Settings
from target_service.tracing import Tracing
from target_service.verifier import Verifier

READ_AT_ONCE = 64  # tokens of an output; then other grammars have their turn


def load(settings: Settings) -> tuple[Engine, Vocabulary, GrammarCompiler]:
    """Runs on the engine thread: torch keeps its thread settings per thread."""
    config = EngineConfig(
        model_dir=settings.model,
        dtype=settings.dtype,
        path=settings.engine_path,
        simulated=f"{settings.sim},acceptance=1",  # what a target says is right
        device=settings.device,
        kv_tokens=settings.kv_tokens,
        threads=settings.threads,
        max_rows=max(settings.max_step_rows, 128),  # the self-test feeds more at once than a step may
        self_test=settings.self_test,
    )
    tokenizer = load_tokenizer(settings.model)
    return load_engine(config), describe(tokenizer, settings.model), GrammarCompiler(tokenizer)


class Grammars:
    """Makes the states of grammars on a thread of its own."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler, self._thread = compiler, ThreadPoolExecutor(1, "grammars")

    async def ready(self, order: Compile) -> Constraint:
        """A grammar's state with the row behind the output looked at: nothing is left to be made or read on the engine's thread. Raises
        InvalidRequest and Unsupported for what is no grammar; an output that breaks it is told to the round that asks."""
        run = asyncio.get_running_loop().run_in_executor
        constraint = await run(self._thread, self._compiler.compile, order.grammar)
        for length in range(0, len(order.output) + READ_AT_ONCE, READ_AT_ONCE):
            if not await run(self._thread, reads, constraint, order.output[:length]):
                break
        return constraint

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def reads(constraint: Constraint, output: Sequence[int]) -> bool:
    """Brings the state to the row behind `output`; False where there is none."""
    try:
        constraint.at(output)
    except InvalidRequest:
        return False
    return True


def model_info(settings: Settings, engine: Engine, words: Vocabulary, budget: KvBudget) -> ModelInfo:
    """`max_model_len` is what model and pool can hold, so that a session alone always fits. A padded head's ids are nobody's.

    Raises Mismatch when the head is shorter than the vocabulary.
    """
    if engine.info.vocab_size < words.size:
        raise Mismatch(f"the head has {engine.info.vocab_size} rows, the tokenizer {words.size} ids")
    return ModelInfo(
        model=settings.model.name,
        vocab_size=words.size,
        vocabulary_fingerprint=words.fingerprint,
        eos_token_ids=words.eos_ids,
        max_model_len=min(engine.info.window, budget.total_tokens),
        boot_id=uuid.uuid4().hex,
        numerics_fingerprint=engine.info.numerics_fingerprint,
        batch_invariant=engine.info.batch_invariant,
        dtype=engine.info.dtype,
        kv_total_tokens=budget.total_tokens,
        max_num_speculative_tokens=settings.max_num_speculative_tokens,
        max_sessions=settings.max_sessions,
        model_fingerprint=engine.info.model_fingerprint,
    )


def limits(settings: Settings, info: ModelInfo) -> Limits:
    return Limits(
        vocab_size=info.vocab_size,
        window=info.max_model_len,
        max_sessions=settings.max_sessions,
        max_step_rows=settings.max_step_rows,
        max_num_speculative_tokens=settings.max_num_speculative_tokens,
        reserve_tokens=settings.reserve_tokens,
        lease_ms=float(settings.lease_ms),
        prefix_block_tokens=BLOCK_TOKENS if settings.prefix_cache else 0,
        max_run_ahead=settings.max_run_ahead,
    )


async def build(settings: Settings, runtime: Runtime, thread: EngineThread) -> Service:
    engine, words, grammars = await thread.run(load, settings)
    budget = KvBudget(engine.info.kv_total_tokens)
    info = model_info(settings, engine, words, budget)
    verifier = Verifier(limits(settings, info), budget)
    executor = Executor(engine, info.vocab_size, info.eos_token_ids)
    tracing = Tracing(SessionSpans(runtime.telemetry, "verify"))
    observer = StepObserver(runtime.telemetry, verifier, tracing)
    runtime.telemetry.gauge("specdec.step.age", lambda: step_age_s(thread.running_since))
    runtime.telemetry.gauge("specdec.memory", lambda: [(size, {"kind": kind}) for kind, size in engine.memory.items()])
    compilers = Grammars(grammars)
    loop = EngineLoop(
        verifier,
        executor.execute,
        thread,
        observer,
        compilers.ready,
        settings.max_unread_results,
        smoothing_s=settings.scaling_smoothing_ms / 1000,
    )
    turns = asyncio.create_task(loop.run(), name="engine loop")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            runtime.fail(f"the engine cannot go on: {error}")

    turns.add_done_callback(ended)

    async def close() -> None:
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
        thread.close(wait=False)
        compilers.close()
        tracing.end()

    servicer = TargetServicer(loop, info, tracing)
    return Service(
        add=servicer.add_to,
        draining=lambda: loop.draining(settings.drain_ms),
        drain=loop.drain,
        close=close,
        alive=lambda: loop.alive() and thread.alive(settings.hung_step_ms / 1000),
    )


def main() -> int:
    thread = EngineThread("engine")
    return thread.leave(serve("target", Settings, lambda settings, runtime: build(settings, runtime, thread)))


if __name__ == "__main__":
    sys.exit(main())
