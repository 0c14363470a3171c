"""DraftService.Draft: commands one way, events and load the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specdec import terms
from specdec.errors import InvalidRequest, ProtocolFault
from specdec.terms.record import record
from specdec.v1 import draft_pb2
from specdec.wire.shared import (
    MAX_ITEMS,
    MAX_MESSAGE_CHARS,
    bounded,
    counted,
    distribution_to_wire,
    distributions,
    draft_method_to_wire,
    ids,
    methods_from_wire,
    name_from_wire,
    rejection_method_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)

# ---------------------------------------------------------------- commands


def open_to_wire(command: terms.Open) -> draft_pb2.Open:
    return draft_pb2.Open(
        session_id=command.session_id,
        epoch=command.epoch,
        tokens=command.tokens,
        prompt_length=command.prompt_length,
        sampling=sampling_to_wire(command.sampling),
        seed=command.seed,
        rejection_sample_method=rejection_method_to_wire(command.rejection_method),
        draft_sample_method=draft_method_to_wire(command.draft_method),
        budget_tokens=command.budget_tokens,
        num_speculative_tokens=command.num_speculative_tokens,
        traceparent=command.traceparent,
    )


def open_from_wire(message: draft_pb2.Open) -> terms.Open:
    tokens = ids(message.tokens, "open.tokens")
    if not 1 <= message.prompt_length <= len(tokens):
        raise InvalidRequest("open.prompt_length", f"must be 1 to the {len(tokens)} committed tokens")
    rejection, draft = methods_from_wire(message.rejection_sample_method, message.draft_sample_method)
    return terms.Open(
        session_id=name_from_wire(message.session_id, "open.session_id"),
        epoch=counted(message.epoch, "open.epoch"),
        tokens=tokens,
        prompt_length=message.prompt_length,
        sampling=sampling_from_wire(message.sampling),
        seed=message.seed,
        rejection_method=rejection,
        draft_method=draft,
        budget_tokens=message.budget_tokens,
        num_speculative_tokens=message.num_speculative_tokens,
        traceparent=message.traceparent,
    )


def _sent_fields(command: terms.Sent) -> dict[str, Any]:
    return {
        "session_id": command.session_id,
        "prefix_length": command.prefix_length,
        "prefix_hash": command.prefix_hash,
        "num_proposed": command.num_proposed,
        "tokens": command.tokens,
    }


def sent_from_wire(message: draft_pb2.Sent) -> terms.Sent:
    tokens = ids(message.tokens, "sent.tokens")
    if tokens and len(tokens) != message.num_proposed:
        raise InvalidRequest("sent.tokens", f"must be empty or the {message.num_proposed} tokens of the block")
    session_id = name_from_wire(message.session_id, "sent.session_id")
    return terms.Sent(session_id, message.prefix_length, message.prefix_hash, message.num_proposed, tokens)


def _commit_fields(command: terms.Commit) -> dict[str, Any]:
    return {
        "session_id": command.session_id,
        "prefix_length": command.prefix_length,
        "prefix_hash": command.prefix_hash,
        "tokens": command.tokens,
        "num_speculative_tokens": command.num_speculative_tokens,
    }


def commit_from_wire(message: draft_pb2.Commit) -> terms.Commit:
    tokens = ids(message.tokens, "commit.tokens")
    if not tokens:
        raise InvalidRequest("commit.tokens", "must hold at least one token")
    session_id = name_from_wire(message.session_id, "commit.session_id")
    return terms.Commit(session_id, message.prefix_length, message.prefix_hash, tokens, message.num_speculative_tokens)


# command term → (name in the oneof, to wire: the message or its fields, from wire)
_COMMANDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], terms.DraftCommand]]] = {
    terms.Open: ("open", open_to_wire, open_from_wire),
    terms.Sent: ("sent", _sent_fields, sent_from_wire),
    terms.Commit: ("commit", _commit_fields, commit_from_wire),
    terms.Pause: (
        "pause",
        lambda c: draft_pb2.Pause(session_id=c.session_id),
        lambda m: terms.Pause(name_from_wire(m.session_id, "pause.session_id")),
    ),
    terms.Resume: (
        "resume",
        lambda c: draft_pb2.Resume(session_id=c.session_id),
        lambda m: terms.Resume(name_from_wire(m.session_id, "resume.session_id")),
    ),
    terms.CloseDraft: (
        "close",
        lambda c: draft_pb2.CloseDraft(session_id=c.session_id),
        lambda m: terms.CloseDraft(name_from_wire(m.session_id, "close.session_id")),
    ),
}
_COMMAND_READERS = {name: read for name, _, read in _COMMANDS.values()}


def _command_fields(command: terms.DraftCommand) -> dict[str, Any]:
    """Of a command, built where it belongs: a message that is handed to another one is written and read once more for it."""
    name, write, _ = _COMMANDS[type(command)]
    return {name: write(command)}


def draft_command_to_wire(command: terms.DraftCommand) -> draft_pb2.DraftCommand:
    return draft_pb2.DraftCommand(**_command_fields(command))


def draft_command_from_wire(message: draft_pb2.DraftCommand) -> terms.DraftCommand:
    kind = message.WhichOneof("command")
    if kind is None:
        raise InvalidRequest("commands", f"a command must hold exactly one of: {', '.join(_COMMAND_READERS)}")
    return _COMMAND_READERS[kind](getattr(message, kind))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    orchestrator_id: str | None
    commands: tuple[terms.DraftCommand, ...] = ()


def draft_request_to_wire(
    commands: Iterable[terms.DraftCommand], orchestrator_id: str | None = None, link: str = ""
) -> draft_pb2.DraftRequest:
    """With an `orchestrator_id`: the first message of a stream. `link` empty: it does not say which of its connections this is."""
    items = [_command_fields(command) for command in commands]
    return draft_pb2.DraftRequest(orchestrator_id=orchestrator_id, commands=items, link=link or None)


def draft_request_from_wire(message: draft_pb2.DraftRequest) -> DraftRequest:
    """Raises InvalidRequest: commands change state in order, so a broken one leaves the stream without a meaning."""
    bounded(message.commands, MAX_ITEMS, "commands", "MAX_ITEMS")
    named = message.HasField("orchestrator_id")
    orchestrator_id = name_from_wire(message.orchestrator_id, "orchestrator_id") if named else None
    return DraftRequest(orchestrator_id, tuple(draft_command_from_wire(command) for command in message.commands))


# ---------------------------------------------------------------- events


MAX_PROPOSAL = 1024  # tokens of one proposal


def proposal_to_wire(event: terms.Proposal) -> draft_pb2.Proposal:
    return draft_pb2.Proposal(
        session_id=event.session_id,
        epoch=event.epoch,
        prefix_length=event.prefix_length,
        prefix_hash=event.prefix_hash,
        tokens=event.tokens,
        confidences=event.confidences,
        distributions=[distribution_to_wire(q) for q in event.distributions],
    )


def proposal_from_wire(message: draft_pb2.Proposal) -> terms.Proposal:
    bounded(message.tokens, MAX_PROPOSAL, "proposal.tokens", "MAX_PROPOSAL")
    tokens = tuple(message.tokens)
    if not tokens:
        raise InvalidRequest("proposal.tokens", "must hold at least one token")
    confidences = tuple(message.confidences)
    if confidences and len(confidences) != len(tokens):
        raise InvalidRequest("proposal.confidences", f"one per token or none at all: {len(tokens)} tokens")
    for confidence in confidences:
        if not 0.0 <= confidence <= 1.0:
            raise InvalidRequest("proposal.confidences", "must be finite numbers in [0, 1]")
    return terms.Proposal(
        session_id=message.session_id,
        epoch=message.epoch,
        prefix_length=message.prefix_length,
        prefix_hash=message.prefix_hash,
        tokens=tokens,
        confidences=confidences,
        distributions=distributions(message.distributions, len(tokens), "proposal.distributions"),
    )


def _refused_to_wire(event: terms.Refused) -> draft_pb2.Refused:
    return draft_pb2.Refused(
        session_id=event.session_id,
        epoch=event.epoch,
        reason=event.reason[:MAX_MESSAGE_CHARS],
        retry_after_ms=event.retry_after_ms,
    )


# event term → (name in the oneof, to wire, from wire)
_EVENTS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], terms.DraftEvent]]] = {
    terms.Proposal: ("proposal", proposal_to_wire, proposal_from_wire),
    terms.Resync: (
        "resync",
        lambda e: draft_pb2.Resync(session_id=e.session_id, epoch=e.epoch, have=e.have),
        lambda m: terms.Resync(m.session_id, m.epoch, m.have),
    ),
    terms.Refused: (
        "refused",
        _refused_to_wire,
        lambda m: terms.Refused(m.session_id, m.epoch, m.reason, m.retry_after_ms),
    ),
}
_EVENT_READERS = {name: read for name, _, read in _EVENTS.values()}


def draft_event_to_wire(event: terms.DraftEvent) -> draft_pb2.DraftEvent:
    name, write, _ = _EVENTS[type(event)]
    return draft_pb2.DraftEvent(**{name: write(event)})


def draft_event_from_wire(message: draft_pb2.DraftEvent) -> terms.DraftEvent:
    """Raises ProtocolFault: a draft that sends this made a mistake, and its event is as good as none."""
    kind = message.WhichOneof("event")
    if kind is None:
        raise ProtocolFault("event: no kind that is known here")
    try:
        return _EVENT_READERS[kind](getattr(message, kind))
    except InvalidRequest as error:
        raise ProtocolFault(str(error)) from error


@record(frozen=True, slots=True)
class DraftResponse:
    """`faults`: what was wrong with the events that are left out; each is as good as no proposal."""

    events: tuple[terms.DraftEvent, ...] = ()
    load: terms.DraftLoad | None = None
    faults: tuple[ProtocolFault, ...] = ()


def draft_response_to_wire(events: Iterable[terms.DraftEvent] = (), load: terms.DraftLoad | None = None) -> draft_pb2.DraftResponse:
    return draft_pb2.DraftResponse(
        events=[draft_event_to_wire(event) for event in events], load=None if load is None else load_to_wire(load)
    )


def draft_response_from_wire(message: draft_pb2.DraftResponse) -> DraftResponse:
    """Never raises: the draft is trusted with nothing, a broken event only costs its proposal."""
    events: list[terms.DraftEvent] = []
    faults: list[ProtocolFault] = []
    for event in message.events[:MAX_ITEMS]:
        try:
            events.append(draft_event_from_wire(event))
        except ProtocolFault as fault:
            faults.append(fault)
    if len(message.events) > MAX_ITEMS:
        faults.append(ProtocolFault(f"events: at most {MAX_ITEMS} (MAX_ITEMS), got {len(message.events)}"))
    load = load_from_wire(message.load) if message.HasField("load") else None
    return DraftResponse(tuple(events), load, tuple(faults))


def load_to_wire(load: terms.DraftLoad) -> draft_pb2.Load:
    return draft_pb2.Load(**{name: getattr(load, name) for name in terms.DraftLoad.__dataclass_fields__})


def load_from_wire(message: draft_pb2.Load) -> terms.DraftLoad:
    return terms.DraftLoad(**{name: getattr(message, name) for name in terms.DraftLoad.__dataclass_fields__})
