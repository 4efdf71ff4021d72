"""Group advantages for SkyRL. Stored laws are a `CalibratedReward` that an environment's ``step`` asks."""

from infalign.integrations.estimators import check_version, estimator


def register(objective: str) -> None:
    """Make ``trainer.algorithm.advantage_estimator=OBJECTIVE`` known to SkyRL. Raises ConfigError."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator

    check_version("skyrl")
    register_advantage_estimator(objective)(estimator(objective))
