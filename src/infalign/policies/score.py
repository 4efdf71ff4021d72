"""The rewards of rollouts: the call."""

from pathlib import Path
from tempfile import TemporaryDirectory

from infalign.core.progress import shown
from infalign.core.storage import listed
from infalign.method.calibration import Array
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_to
from infalign.rewards.sources import AnyReward, load_reward
from infalign.sampling.prompts import repeated
from infalign.sampling.sample import Rollouts


def score(reward: AnyReward, rollouts: Rollouts) -> Array:
    """Return the reward of each response, (P, K). Equal responses to one prompt are scored once, so they tie.

    ``reward`` is the folder or hub id of a reward model, or a function or its spelling ``mine.py:score``, called as a
    recipe's is: by the names of its parameters, ``(prompts, responses)`` and columns of the prompts' rows, or TRL's or
    verl's. Prompts are lists of messages. Where it returns None for all responses to a prompt, the row is NaN. Raises
    DataError for what is no finite number, InfalignError for what the function raises.

    >>> rollouts = sample(MODEL, [{"prompt": "What is 2 + 2?", "answer": "4"}], k=3, max_new_tokens=8)
    >>> score(lambda responses, answer: [float(a in r) for r, a in zip(responses, answer)], rollouts).shape
    (1, 3)
    """
    asked, k, texts = rollouts.prompts, rollouts.k, listed(rollouts.drawn, "text")
    rows = Batch(repeated(asked.conversations, k), texts, repeated(asked.columns, k))
    named = NamedReward(load_reward(reward), getattr(reward, "__name__", str(reward)), "")
    with TemporaryDirectory() as folder, shown("score") as report:
        return score_to(Path(folder), named, rows, on_progress=report).reshape(-1, k)
