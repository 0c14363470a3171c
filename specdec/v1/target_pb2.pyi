from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("hello", "items")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("orchestrator_id", "link")
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    orchestrator_id: str
    link: str
    def __init__(self, orchestrator_id: _Optional[str] = ..., link: _Optional[str] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("step", "close", "ahead")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    step: Step
    close: Close
    ahead: Ahead
    def __init__(self, step: _Optional[_Union[Step, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., ahead: _Optional[_Union[Ahead, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "base_length", "base_hash", "tokens", "num_proposed", "run_ahead", "remaining_ms", "distributions", "begin")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    base_length: int
    base_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_proposed: int
    run_ahead: int
    remaining_ms: int
    distributions: _containers.RepeatedCompositeFieldContainer[_common_pb2.DraftDistribution]
    begin: Begin
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base_length: _Optional[int] = ..., base_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_proposed: _Optional[int] = ..., run_ahead: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., distributions: _Optional[_Iterable[_Union[_common_pb2.DraftDistribution, _Mapping]]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("prompt_length", "sampling", "seed", "rejection_sample_method", "draft_sample_method", "traceparent", "fork_session_id", "priority")
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REJECTION_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FORK_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    prompt_length: int
    sampling: _common_pb2.SamplingParams
    seed: int
    rejection_sample_method: _common_pb2.RejectionSampleMethod
    draft_sample_method: _common_pb2.DraftSampleMethod
    traceparent: str
    fork_session_id: str
    priority: int
    def __init__(self, prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., rejection_sample_method: _Optional[_Union[_common_pb2.RejectionSampleMethod, str]] = ..., draft_sample_method: _Optional[_Union[_common_pb2.DraftSampleMethod, str]] = ..., traceparent: _Optional[str] = ..., fork_session_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Ahead(_message.Message):
    __slots__ = ("session_id", "epoch", "prefix_length", "prefix_hash", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    prefix_length: int
    prefix_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefix_length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("answers", "step", "beat")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[VerifyAnswer]
    step: EngineStep
    beat: Beat
    def __init__(self, answers: _Optional[_Iterable[_Union[VerifyAnswer, _Mapping]]] = ..., step: _Optional[_Union[EngineStep, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class EngineStep(_message.Message):
    __slots__ = ("rows", "engine_us")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    rows: int
    engine_us: int
    def __init__(self, rows: _Optional[int] = ..., engine_us: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("sessions", "queued", "kv_used_tokens", "kv_total_tokens", "running_step_ms", "predicted_step_ms", "draining", "drain_remaining_ms", "backlog_ms", "kv_demand")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_MS_FIELD_NUMBER: _ClassVar[int]
    KV_DEMAND_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    queued: int
    kv_used_tokens: int
    kv_total_tokens: int
    running_step_ms: int
    predicted_step_ms: int
    draining: bool
    drain_remaining_ms: int
    backlog_ms: float
    kv_demand: float
    def __init__(self, sessions: _Optional[int] = ..., queued: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_total_tokens: _Optional[int] = ..., running_step_ms: _Optional[int] = ..., predicted_step_ms: _Optional[int] = ..., draining: _Optional[bool] = ..., drain_remaining_ms: _Optional[int] = ..., backlog_ms: _Optional[float] = ..., kv_demand: _Optional[float] = ...) -> None: ...

class VerifyAnswer(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "queue_us", "result", "prefix_needed", "unknown_session", "no_room", "stale_epoch", "stale_round", "expired", "failed", "closed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_NEEDED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SESSION_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STALE_ROUND_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    queue_us: int
    result: Result
    prefix_needed: PrefixNeeded
    unknown_session: UnknownSession
    no_room: NoRoom
    stale_epoch: StaleEpoch
    stale_round: StaleRound
    expired: Expired
    failed: Failed
    closed: Closed
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., queue_us: _Optional[int] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., prefix_needed: _Optional[_Union[PrefixNeeded, _Mapping]] = ..., unknown_session: _Optional[_Union[UnknownSession, _Mapping]] = ..., no_room: _Optional[_Union[NoRoom, _Mapping]] = ..., stale_epoch: _Optional[_Union[StaleEpoch, _Mapping]] = ..., stale_round: _Optional[_Union[StaleRound, _Mapping]] = ..., expired: _Optional[_Union[Expired, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("prefix_length", "kv_length_after", "num_verified", "num_accepted", "tokens", "logprobs", "forced", "finish", "stop_token_id", "prompt_logprobs")
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_LENGTH_AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prefix_length: int
    kv_length_after: int
    num_verified: int
    num_accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    forced: _containers.RepeatedScalarFieldContainer[int]
    finish: _common_pb2.FinishReason
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, prefix_length: _Optional[int] = ..., kv_length_after: _Optional[int] = ..., num_verified: _Optional[int] = ..., num_accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., forced: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PrefixNeeded(_message.Message):
    __slots__ = ("have",)
    HAVE_FIELD_NUMBER: _ClassVar[int]
    have: int
    def __init__(self, have: _Optional[int] = ...) -> None: ...

class UnknownSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NoRoom(_message.Message):
    __slots__ = ("retry_after_ms",)
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    retry_after_ms: int
    def __init__(self, retry_after_ms: _Optional[int] = ...) -> None: ...

class StaleEpoch(_message.Message):
    __slots__ = ("current",)
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    current: int
    def __init__(self, current: _Optional[int] = ...) -> None: ...

class StaleRound(_message.Message):
    __slots__ = ("current",)
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    current: int
    def __init__(self, current: _Optional[int] = ...) -> None: ...

class Expired(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "drop")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    drop: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., drop: _Optional[bool] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
