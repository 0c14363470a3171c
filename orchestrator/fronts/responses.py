"""What the core says → messages of specdec.v1.GenerationService. One small function per message; no decisions."""

from __future__ import annotations

from orchestrator.answer import Delta, Finished, Usage
from orchestrator.events import Admitted
from orchestrator.output import GenerationStats
from specdec import wire
from specdec.terms import ModelInfo
from specdec.v1 import generation_pb2 as pb


def started(index: int, admitted: Admitted, request_id: str, info: ModelInfo) -> pb.GenerateResponse:
    message = pb.Started(request_id=request_id, seed=admitted.seed, prompt_tokens=admitted.prompt_length, model=info.model)
    return pb.GenerateResponse(index=index, started=message)


def delta(index: int, piece: Delta) -> pb.GenerateResponse:
    message = pb.GenerateResponse()  # field by field: one of these goes out for every round, and keywords take twice as long
    if index:
        message.index = index
    told = message.delta
    told.token_ids.extend(piece.token_ids)
    told.text = piece.text
    if piece.logprobs:
        told.logprobs.extend([wire.logprobs_to_wire(entry) for entry in piece.logprobs])
    if piece.origins:
        told.origins.extend([wire.origin_to_wire(origin) for origin in piece.origins])
    if piece.prompt_logprobs:
        told.prompt_logprobs.extend([wire.logprobs_to_wire(entry) for entry in piece.prompt_logprobs])
    return message


def finished(index: int, piece: Finished, admitted: Admitted, info: ModelInfo) -> pb.GenerateResponse:
    message = pb.Finished(
        finish_reason=wire.finish_to_wire(piece.reason),
        stop_reason=piece.stop_reason,
        usage=usage(piece.usage),
        speculative=speculative(piece.stats),
        settings=settings(admitted, info),
    )
    return pb.GenerateResponse(index=index, finished=message)


def usage(counts: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        accepted_prediction_tokens=counts.accepted,
        rejected_prediction_tokens=counts.rejected,
        discarded_tokens=counts.discarded,
    )


def speculative(stats: GenerationStats) -> pb.SpeculativeStats:
    return pb.SpeculativeStats(
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=stats.draft_acceptance_rate,
        acceptance_histogram=stats.histogram,
        num_draft_tokens=stats.drafted,
        num_accepted_draft_tokens=stats.accepted,
        num_spec_steps=stats.spec_rounds,
        num_spec_tokens=stats.spec_tokens,
        hit_rate=stats.hit_rate,
        num_rounds=stats.rounds,
        num_replacements=stats.replacements,
    )


def settings(admitted: Admitted, info: ModelInfo) -> pb.EffectiveSettings:
    return pb.EffectiveSettings(
        sampling=wire.sampling_to_wire(admitted.sampling),
        rejection_sample_method=wire.rejection_method_to_wire(admitted.rejection_method),
        draft_sample_method=wire.draft_method_to_wire(admitted.draft_method),
        num_speculative_tokens=admitted.num_speculative_tokens,
        enable_adaptive_verification=admitted.adaptive,
        batch_invariant=info.batch_invariant,
        numerics_fingerprint=info.numerics_fingerprint,
    )
