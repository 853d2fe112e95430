"""A sample of `scripts/fuzz_backward.py`: random models in random wrappings have the plain model's gradients."""

from __future__ import annotations

import pytest

from tests.harness import random_models, random_programs
from tests.harness.lockstep import ALL_SMALL, with_gradients
from tests.harness.pool import run_ranks
from tests.harness.versions import RELEASE

# The checkpoint of older versions of torch raises once more when it is deleted after a failed forward.
_OF_CHECKPOINT = "ignore:Exception ignored in. <generator object _checkpoint"
pytestmark = [] if RELEASE >= (2, 13) else [pytest.mark.filterwarnings(_OF_CHECKPOINT)]

SEEDS = range(7, 25)  # includes all pieces, strategies, passes and kinds of checkpointing


@ALL_SMALL
def test_random_programs_train_like_the_plain_model(all_small: bool) -> None:
    run_ranks(2, with_gradients, all_small, random_programs.check_range, SEEDS[all_small::2])


def test_the_sample_covers_all_pieces_and_passes() -> None:
    text = "\n".join(str(random_programs.plan_of(seed)) for seed in SEEDS)
    drawn = (*random_models.KINDS, *random_models.PIECES, *random_models.PASSES, *random_models.HOW_GIVEN)
    further = ("twice", "ignored", "taken", "separate roots", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    assert [word for word in (*drawn, *further) if word not in text] == []
