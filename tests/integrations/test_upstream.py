"""The estimator that may be sent to other trainers, against ours."""

import numpy as np
import pytest
import torch
from pkpo import pass_at_k

from infalign import advantages


@pytest.mark.parametrize(("n", "k"), [(2, 2), (8, 8), (32, 8), (256, 100)])
def test_what_is_sent_upstream_is_ours(n: int, k: int) -> None:
    """For rewards of 0 and 1, and for any."""
    chance = np.random.default_rng(n)
    for rewards in (chance.integers(2, size=n).astype(float), chance.normal(size=n)):
        found = pass_at_k(torch.tensor(rewards), k)
        np.testing.assert_allclose(found, advantages(rewards, np.zeros(n), f"pass@{k}"), atol=1e-9)
