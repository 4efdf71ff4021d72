"""Registers pass@k advantages: ``VERL_USE_EXTERNAL_MODULES=recipe.pass_at_k.register``."""

import os

from verl.trainer.ppo.core_algos import register_adv_est

from .pkpo import pass_at_k_of_batch

K = int(os.environ.get("PASS_AT_K", "8"))


@register_adv_est("pass_at_k")
def compute_pass_at_k_advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    """Return advantages and returns, (batch, length); a KL belongs in the loss, where it leaves them as they are."""
    if config is not None and config.use_kl_in_reward:
        raise ValueError("algorithm.use_kl_in_reward changes the rewards that pass@k is of; set actor.use_kl_loss")
    return pass_at_k_of_batch(token_level_rewards, response_mask, index, K)
