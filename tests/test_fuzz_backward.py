"""A sample of `scripts/fuzz_backward.py`: random models, wrapped in random ways, give the plain model's gradients."""

from __future__ import annotations

from tests.harness import random_models, random_programs
from tests.harness.lockstep import ALL_SMALL, with_gradients
from tests.harness.pool import run_ranks

SEEDS = range(7, 16)  # all pieces, strategies, passes and kinds of checkpointing are among them


@ALL_SMALL
def test_random_programs_train_as_the_plain_model_does(all_small: bool) -> None:
    """Whatever lies in the units and between them."""
    run_ranks(2, with_gradients, all_small, random_programs.check_range, SEEDS)


def test_the_sample_has_something_of_everything() -> None:
    text = "\n".join(str(random_programs.plan_of(seed)) for seed in SEEDS)
    drawn = (*random_models.KINDS, *random_models.PIECES, *random_models.PASSES, *random_models.HOW_GIVEN)
    others = ("twice", "ignored", "taken", "separate roots", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    assert [word for word in (*drawn, *others) if word not in text] == []
