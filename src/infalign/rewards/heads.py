"""Rewards that are heads on one frozen model: one pass through it gives all of them."""

from collections.abc import Sequence
from functools import partial
from itertools import islice

from infalign.data.messages import Message, prompt_id
from infalign.rewards.base import RewardFunction
from infalign.rewards.classifier import ClassifierReward

KEPT = 2**18  # responses whose outputs are kept, some 100 MB; others are read again


def share_passes(rewards: Sequence[ClassifierReward]) -> list[RewardFunction]:
    """Return rewards that share their passes, if they are heads on one frozen model; otherwise the ``rewards``.

    They have one tokenizer.
    """
    from infalign.models.pooled import PooledForSequenceClassification

    models = [reward.model for reward in rewards]
    heads = [model for model in models if isinstance(model, PooledForSequenceClassification)]
    joined = PooledForSequenceClassification.joined(heads) if len(heads) == len(models) else None
    if joined is None:
        return [*rewards]
    whole = ClassifierReward(joined, rewards[0].tokenizer, batch_tokens=rewards[0].batch_tokens, outputs=len(heads))
    known = dict[tuple[str, str], list[float]]()  # all outputs of a pass, by prompt and response

    def read(place: int, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        keys = list(zip(map(prompt_id, prompts), responses, strict=True))
        found = {key: known[key] for key in keys if key in known}
        new = {key: row for row, key in enumerate(keys) if key not in found}
        if new:
            rows = new.values()
            outputs = whole.outputs([prompts[row] for row in rows], [responses[row] for row in rows])
            given = dict(zip(new, outputs, strict=True))
            found |= given
            known.update(islice(given.items(), max(0, KEPT - len(known))))
        return [found[key][place] for key in keys]

    return [partial(read, place) for place in range(len(heads))]
