"""Rewards that are heads on one frozen model: one pass through it gives all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from infalign.data.examples import Message, prompt_id
from infalign.rewards.base import RewardFunction
from infalign.rewards.classifier import ClassifierReward

KEPT = 2**18  # responses whose outputs are kept, some 100 MB; others are read again


@dataclass(frozen=True, slots=True)
class _OfPass:
    """One output of a pass; what the pass says besides is kept for the others."""

    whole: ClassifierReward
    place: int
    known: dict[tuple[str, str], list[float]]  # the outputs by prompt and response

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row; those that another output's pass has read are not read again."""
        keys = list(zip(map(prompt_id, prompts), responses, strict=True))
        found = {key: self.known[key] for key in keys if key in self.known}
        new = {key: row for row, key in enumerate(keys) if key not in found}
        if new:
            rows = new.values()
            outputs = self.whole.outputs([prompts[row] for row in rows], [responses[row] for row in rows])
            read = dict(zip(new, outputs, strict=True))
            found |= read
            self.known.update(islice(read.items(), max(0, KEPT - len(self.known))))
        return [found[key][self.place] for key in keys]


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
    known = dict[tuple[str, str], list[float]]()
    return [_OfPass(whole, place, known) for place in range(len(heads))]
