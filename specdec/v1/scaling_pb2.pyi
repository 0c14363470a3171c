from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetWaitingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWaitingResponse(_message.Message):
    __slots__ = ("orchestrator_id", "pools")
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    orchestrator_id: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolWaiting]
    def __init__(self, orchestrator_id: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolWaiting, _Mapping]]] = ...) -> None: ...

class PoolWaiting(_message.Message):
    __slots__ = ("pool", "pool_name", "waiting")
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_NAME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    pool: str
    pool_name: str
    waiting: int
    def __init__(self, pool: _Optional[str] = ..., pool_name: _Optional[str] = ..., waiting: _Optional[int] = ...) -> None: ...
