"""Group advantages for AReaL, which has no hook for estimators: a workflow sees a whole group, so it computes them.

With ``actor.reward_norm`` and ``actor.adv_norm`` unset, AReaL's PPOActor takes them as they are and adds its KL. It
clips at ``actor.reward_clip``, 20 by default.
"""

import logging
from typing import Any

from areal.api import RolloutWorkflow
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.utils.dynamic_import import import_from_string

from infalign.integrations.estimators import check_version, of_groups


class GroupAdvantages(RolloutWorkflow):
    """A workflow whose episodes are ``group_size`` of another's, with their advantages as rewards.

    AReaL sends the dotted name of a workflow and its arguments to its workers, so the other one is given likewise. Its
    own groups, ``gconfig.n_samples``, must be of 1. Raises DataError where fewer episodes than the objective needs are
    left in a group.
    """

    def __init__(self, workflow: str, workflow_kwargs: dict[str, Any], group_size: int, objective: str) -> None:
        check_version("areal")
        one = import_from_string(workflow)(**workflow_kwargs)
        self._group = GroupedRolloutWorkflow(one, group_size, logging.getLogger(__name__))
        self._objective = objective

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the tensors of a group, or None if all episodes were rejected."""
        tensors: dict[str, Any] | None = await self._group.arun_episode(engine, data)
        if tensors is not None:
            tensors["rewards"] = of_groups(tensors["rewards"], [0] * len(tensors["rewards"]), self._objective)
        return tensors
