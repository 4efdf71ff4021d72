"""verl's advantage estimator ``infalign_maxk``, which verl finds by the entry point in its group ``verl.plugins``."""

from verl.trainer.ppo.core_algos import register_adv_est

from infalign.integrations.verl import maxk

register_adv_est("infalign_maxk")(maxk)
