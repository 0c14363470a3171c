from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("orchestrator_id", "commands", "link")
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    orchestrator_id: str
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    link: str
    def __init__(self, orchestrator_id: _Optional[str] = ..., commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ..., link: _Optional[str] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("open", "sent", "commit", "pause", "resume", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    sent: Sent
    commit: Commit
    pause: Pause
    resume: Resume
    close: CloseDraft
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., close: _Optional[_Union[CloseDraft, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session_id", "epoch", "tokens", "prompt_length", "sampling", "seed", "rejection_sample_method", "draft_sample_method", "budget_tokens", "num_speculative_tokens", "traceparent")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REJECTION_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _common_pb2.SamplingParams
    seed: int
    rejection_sample_method: _common_pb2.RejectionSampleMethod
    draft_sample_method: _common_pb2.DraftSampleMethod
    budget_tokens: int
    num_speculative_tokens: int
    traceparent: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., rejection_sample_method: _Optional[_Union[_common_pb2.RejectionSampleMethod, str]] = ..., draft_sample_method: _Optional[_Union[_common_pb2.DraftSampleMethod, str]] = ..., budget_tokens: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("session_id", "prefix_length", "prefix_hash", "num_proposed", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefix_length: int
    prefix_hash: int
    num_proposed: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., prefix_length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., num_proposed: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("session_id", "prefix_length", "prefix_hash", "tokens", "num_speculative_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefix_length: int
    prefix_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_speculative_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., prefix_length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseDraft(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    load: Load
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("proposal", "resync", "refused")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    proposal: Proposal
    resync: Resync
    refused: Refused
    def __init__(self, proposal: _Optional[_Union[Proposal, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session_id", "epoch", "prefix_length", "prefix_hash", "tokens", "confidences", "distributions")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    prefix_length: int
    prefix_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    distributions: _containers.RepeatedCompositeFieldContainer[_common_pb2.DraftDistribution]
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefix_length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., distributions: _Optional[_Iterable[_Union[_common_pb2.DraftDistribution, _Mapping]]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("session_id", "epoch", "have")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    have: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., have: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("session_id", "epoch", "reason", "retry_after_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    reason: str
    retry_after_ms: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("needed_work_share", "late_share", "sessions", "kv_used_tokens", "kv_total_tokens", "draining", "needed_time_share", "late_demand")
    NEEDED_WORK_SHARE_FIELD_NUMBER: _ClassVar[int]
    LATE_SHARE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NEEDED_TIME_SHARE_FIELD_NUMBER: _ClassVar[int]
    LATE_DEMAND_FIELD_NUMBER: _ClassVar[int]
    needed_work_share: float
    late_share: float
    sessions: int
    kv_used_tokens: int
    kv_total_tokens: int
    draining: bool
    needed_time_share: float
    late_demand: float
    def __init__(self, needed_work_share: _Optional[float] = ..., late_share: _Optional[float] = ..., sessions: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_total_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., needed_time_share: _Optional[float] = ..., late_demand: _Optional[float] = ...) -> None: ...
