"""The engine library of draft and target: ragged batches, K/V with exact rollback, a row's bits independent of its batch."""

from specdec.engine.api import Engine, EngineConfig, EngineInfo, KvSlots, UnsupportedModel
from specdec.engine.batch import Segment
from specdec.engine.cache import BLOCK_TOKENS, KvBudget, OutOfRoom
from specdec.engine.model import load_engine, load_engine_from_module, load_engine_from_weights
from specdec.engine.worker import EngineThread

__all__ = [
    "BLOCK_TOKENS",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineThread",
    "KvBudget",
    "KvSlots",
    "OutOfRoom",
    "Segment",
    "UnsupportedModel",
    "load_engine",
    "load_engine_from_module",
    "load_engine_from_weights",
]
