"""A recipe in its run directory: what the stages declare their units from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infalign.evaluation.settings import Evaluate
from infalign.models.pretrained import model_digest
from infalign.rewards.settings import RewardSource
from infalign.rewards.sources import Scorer
from infalign.runs.fingerprints import Digests, settings_of
from infalign.runs.layout import Layout
from infalign.runs.recipe import Recipe
from infalign.sampling.prompts import PromptTable, Sampler
from infalign.training.target import Target


@dataclass(frozen=True, slots=True)
class Confidence:
    """How wide intervals are, and the seed of what resamples."""

    level: float
    seed: int

    def of(self, values_P: Any) -> dict[str, float]:
        """Return the mean over prompts with its interval."""
        from infalign.evaluation.intervals import estimate

        return estimate(values_P, confidence=self.level, seed=self.seed).as_dict()


@dataclass(frozen=True, slots=True)
class Provenance:
    """What calibrated rewards depend on besides the recipe's words: models, which may be exchanged under a name."""

    reference: str
    reward: Scorer

    def digests(self) -> dict[str, str]:
        """Return the digest of the reference policy and the identity of the reward, as they are now."""
        return {"reference": model_digest(self.reference), "reward": self.reward.identity}


@dataclass(frozen=True, slots=True)
class Run:
    """A recipe in its run directory, with its settings by content (`fingerprints.settings_of`)."""

    recipe: Recipe
    layout: Layout
    contents: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, digests: Digests | None = None) -> "Run":
        """Return the run of a recipe; ``digests`` are those of its directory unless given."""
        layout = Layout(Path(recipe.run_dir))
        return cls(recipe, layout, settings_of(recipe, digests or Digests(layout.digests)))

    def key(self, *names: str) -> dict[str, Any]:
        """Return the seed and the parts of the recipe that an output depends on."""
        return {"seed": self.recipe.seed, **{name: self.contents[name] for name in names}}

    # Models

    @property
    def reference(self) -> str:
        """The folder or hub id of the reference policy."""
        fitted = self.recipe.policy.fit is not None
        return str(self.layout.model("reference")) if fitted else str(self.recipe.policy.model)

    @property
    def reference_inputs(self) -> tuple[Path, ...]:
        """What has to be there before the reference policy can be asked."""
        fitted = self.recipe.policy.fit is not None
        return (self.layout.data, self.layout.model("reference")) if fitted else (self.layout.data,)

    def target(self, name: str) -> Target:
        """Return where the model ``name`` is trained."""
        return target(self.recipe, self.layout, name)

    # Rewards

    def scorer(self, name: str) -> Scorer:
        """Return the reward ``name``: reward, judge or gold."""
        return scorer(self.recipe, self.layout, name)

    def reward_inputs(self, *names: str) -> tuple[Path, ...]:
        """Return the models that have to be trained before the rewards ``names`` can score."""
        return tuple(self.layout.model(name) for name in names if self.recipe.rewards[name].fit is not None)

    @property
    def provenance(self) -> Provenance:
        """What calibrated rewards depend on."""
        return Provenance(self.reference, self.scorer("reward"))

    # Samples

    def sampler(self, model: str) -> Sampler:
        """Return how responses of a model are drawn."""
        rollout = self.recipe.rollout
        return Sampler(model, rollout.engine, rollout.max_new_tokens, self.recipe.compute)

    @property
    def rollout_parts(self) -> list[PromptTable]:
        """The training prompts, in parts whose rollouts are drawn and scored apart."""
        return rollout_parts(self.recipe, self.layout)

    @property
    def sampling_key(self) -> dict[str, Any]:
        """The parts of the recipe that what a model says depends on."""
        rollout = self.contents["rollout"]
        return self.key("policy") | {"rollout": {name: rollout[name] for name in ("engine", "max_new_tokens")}}


def confidence(evaluate: Evaluate, seed: int) -> Confidence:
    """Return how intervals of a recipe are made."""
    return Confidence(evaluate.confidence, seed)


def target(recipe: Recipe, layout: Layout, name: str) -> Target:
    """Return where the model ``name`` of a directory is trained, with a recipe's seed, machine and trackers."""
    return Target(layout.checkpoints(name), layout.model(name), recipe.seed, recipe.compute, tuple(recipe.report_to))


def scorer(recipe: Recipe, layout: Layout, name: str) -> Scorer:
    """Return a recipe's reward ``name``, whose model lies in ``layout`` if it is trained."""
    source: RewardSource = recipe.rewards[name]
    model = str(layout.model(name)) if source.fit is not None else str(source.model)
    return Scorer(name, source, model, layout.tokenizer, recipe.compute, partial(layout.scored, name))


def rollout_parts(recipe: Recipe, layout: Layout) -> list[PromptTable]:
    """Return the training prompts that have rollouts, in parts, whatever the number of processes."""
    parts, first = recipe.rollout.engine.parts, recipe.rollout.prompts
    return [PromptTable(layout.prompts("train"), first, slice(part, None, parts)) for part in range(parts)]
