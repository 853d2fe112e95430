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

SEEDS = {True: (8, 74, 85, 92, 113, 114), False: (5, 47, 70, 79, 109)}  # chosen for the pieces, see below


@ALL_SMALL
def test_random_programs_train_like_the_plain_model(all_small: bool) -> None:
    """The programs of each of the two sizes of gradients have all pieces, strategies, passes and kinds of
    checkpointing.
    """
    texts = run_ranks(2, with_gradients, all_small, random_programs.check_range, SEEDS[all_small])
    drawn = (*random_models.KINDS, *random_models.PIECES, *random_models.PASSES, *random_models.HOW_GIVEN)
    others = ("twice", "ignored", "taken", "separate roots", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    assert [word for word in (*drawn, *others) if word not in "\n".join(texts[0])] == []
