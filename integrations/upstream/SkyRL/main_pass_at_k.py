"""Training with pass@k advantages.

uv run --isolated --extra fsdp -m examples.train.algorithms.pass_at_k.main_pass_at_k
"""

import os
import sys

import ray
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.utils import initialize_ray

from .pkpo import pass_at_k_of_batch

K = int(os.environ.get("PASS_AT_K", "8"))


@register_advantage_estimator("pass_at_k")
def compute_pass_at_k_advantage(token_level_rewards, response_mask, index, **kwargs):
    """Return advantages and returns, both (batch, length)."""
    return pass_at_k_of_batch(token_level_rewards, response_mask, index, K)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: SkyRLTrainConfig):
    """Run the experiment."""
    BasePPOExp(cfg).run()


def main() -> None:
    """Read the configuration and train."""
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
