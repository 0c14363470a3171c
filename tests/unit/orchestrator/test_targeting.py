"""What a Step of one session carries."""

from __future__ import annotations

from orchestrator.events import Admitted
from orchestrator.lookahead import Block, Lookahead
from orchestrator.targeting import TargetSide
from specdec import wire
from specdec.terms import DraftMethod, RejectionMethod, SamplingParams


def test_a_long_block_of_lookups_is_no_list_of_distributions() -> None:
    """A target may take blocks of up to 1,024, a list of distributions holds 256; of a lookup's each is one-hot."""
    request = Admitted(
        "s",
        (1, 2, 3),
        3,
        SamplingParams(max_tokens=900),
        1,
        1024,
        600,
        1024,
        rejection_method=RejectionMethod.STANDARD,
        draft_method=DraftMethod.GREEDY,
    )
    side = TargetSide(request, 0)
    side.new_epoch(1)
    side.new_round(Block((7,) * 300, (None,) * 300, "ngram"), "ngram", 0)
    step = side.step(request.tokens, Lookahead(request.tokens), 1000)
    assert step.num_proposed == 300 and step.distributions == ()
    assert wire.step_from_wire(wire.step_to_wire(step)) == step
