"""An answer that is resumed on another orchestrator, which knows another target: everything an answer carries with it is in its ids.

Cut after every other token, so that a stop string is half matched, a penalty half counted, a word of the grammar half written. The whole
comes from the first pair with speculation, the rest from the second, with another block length.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.v1 import common_pb2
from tests.e2e.drafts import FLOAT64
from tests.e2e.parameters import Fields
from tests.e2e.raw import RawClient
from tests.e2e.seen import ask_all, seen
from tests.e2e.stack import running
from tests.tiny import save_tiny, tiny_tokenizer

pytestmark = [pytest.mark.parameters, pytest.mark.timeout(120)]
IDS = tiny_tokenizer().token_to_id
LETTERS = [IDS(token) for token in ("a", "b", "e", "h", "t", "Ġthe")]
END = IDS("<|im_end|>")
BASE: Fields = {"token_ids": [10, 11, 12, 13, 11, 10], "seed": 11, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
SCHEMA = '{"type": "array", "items": {"enum": ["the", "hat", 12, true]}, "minItems": 3, "maxItems": 5}'
CARRIED: dict[str, Fields] = {
    "penalties": {"allowed_token_ids": LETTERS, "frequency_penalty": 1.3, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    "a half-matched stop string": {"allowed_token_ids": LETTERS, "stop": ["thebeteeeeeb", "theba"]},
    "the same, shown": {"allowed_token_ids": LETTERS, "stop": ["thebeteeeeeb"], "include_stop_str_in_output": True},
    "min_tokens before a stop string": {"allowed_token_ids": LETTERS, "stop": ["the"], "min_tokens": 8},
    "min_tokens before the end": {"ignore_eos": False, "logit_bias": {END: 8.0}, "min_tokens": 13},
    "max_tokens": {"max_tokens": 11},
    "a grammar": {"grammar": common_pb2.Grammar(json_schema=SCHEMA), "max_tokens": 60},
    "a grammar and penalties": {"grammar": common_pb2.Grammar(json_schema=SCHEMA), "max_tokens": 60, "presence_penalty": 2.0},
    "a grammar that begins": {"grammar": common_pb2.Grammar(regex="[0-9]{6,9}", start_after=":"), "logit_bias": {IDS(":"): 6.0}},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RawClient, RawClient]]:
    """Each orchestrator has a target of its own."""
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0)
    with running(model, model, targets=2, target=FLOAT64, draft=FLOAT64) as stack:
        first, second = (stack.add_orchestrator(TARGETS=target.endpoint) for target in stack.targets)
        with RawClient(first.endpoint) as here, RawClient(second.endpoint) as elsewhere:
            yield here, elsewhere


@pytest.mark.parametrize("name", CARRIED)
def test_resumed_elsewhere(two: tuple[RawClient, RawClient], name: str) -> None:
    here, elsewhere = two
    fields = {**BASE, **CARRIED[name]}
    ((whole,), (alone,)) = ask_all([(here, {**fields, "num_speculative_tokens": 4}), (elsewhere, {**fields, "disable_spec_decode": True})])
    (want,) = seen(fields, [whole])
    assert [want] == seen(fields, [alone]) and want["code"] == "OK"
    texts = {ids: text for ids, text in reversed(alone.pieces)}  # characters delivered with so many ids
    cuts = [cut for cut in range(1, len(whole.token_ids), 2) if cut in texts]
    assert len(cuts) >= 4
    asked = [{**fields, "num_speculative_tokens": cut % 4, "output_token_ids": whole.token_ids[:cut]} for cut in cuts]
    for cut, (reply,) in zip(cuts, ask_all([(elsewhere, ask) for ask in asked]), strict=True):
        (rest,) = seen(fields, [reply])
        assert rest == {**want, "ids": want["ids"][cut:], "text": want["text"][texts[cut] :], "logprobs": want["logprobs"][cut:]}, cut


def test_the_state_would_be_missed(two: tuple[RawClient, RawClient]) -> None:
    """The same ids as a longer prompt, which is no output: every kind of state but the window's is gone, and it shows."""
    here, elsewhere = two
    for name in ("penalties", "a half-matched stop string", "min_tokens before the end", "a grammar"):
        fields = {**BASE, **CARRIED[name]}
        ((whole,),) = ask_all([(here, fields)])
        cut = 7
        asked = {**fields, "token_ids": [*BASE["token_ids"], *whole.token_ids[:cut]]}
        ((forgetful,),) = ask_all([(elsewhere, asked)])
        assert forgetful.token_ids != whole.token_ids[cut:], name
