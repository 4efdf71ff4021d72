"""A recipe in its run directory, from which the stages declare their units."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Self

from infalign.models.conversion import converted_folder, is_convertible
from infalign.models.settings import Scratch
from infalign.models.tokenizers import prints_date
from infalign.pipeline.records import records
from infalign.recipe.fingerprints import Digests, settings_of
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.rewards.sources import Scorer
from infalign.sampling.engine import EngineSettings
from infalign.sampling.prompts import PromptTable, Sampler
from infalign.sampling.settings import KINDS
from infalign.steps.samples import StoredRollouts, StoredSamples
from infalign.training.output_folder import Target
from infalign.training.solvers.guide import SIDE_LAYERS, SIDE_WIDTH

OWN_ENGINE = KINDS["shared-prefix"](kind="shared-prefix")
ROLLOUT_PARTS = 4  # in which rollouts are drawn, one unit of work each
TRAINED, READ, DRAWN = 6, 2, 5  # FLOPs per parameter and token: drawing, token by token, is less efficient


@dataclass(frozen=True, slots=True)
class Pass:
    """A cost of a unit: texts that go through models, the prompts of some rows of a data table and their responses."""

    flops: float  # per parameter and token
    models: Sequence[Scratch | str]
    table: str
    rows: float = math.inf  # at most
    responses: float = 1.0

    @classmethod
    def over(cls, flops: float, models: Sequence[Scratch | str], prompts: PromptTable, each: float) -> Self:
        """Return the pass of ``each`` responses to these prompts."""
        return cls(flops / prompts.step, models, prompts.path.stem, prompts.first, each)


@dataclass(frozen=True, slots=True)
class Run:
    """A recipe in its run directory, with content hashes for paths (`fingerprints.settings_of`).

    ``recipe`` has folders in the place of the names of GGUFs and packages, and ``ggufs`` the names by folder.
    """

    recipe: Recipe
    layout: Layout
    contents: Mapping[str, Any]
    ggufs: Mapping[str, str]
    digests: Digests  # of the files outside the run directory that the recipe names

    @classmethod
    def of(cls, recipe: Recipe) -> "Run":
        """Return the run of a recipe."""
        layout = Layout(Path(recipe.run_dir))
        digests = Digests(layout.root / "digests.json")
        named = recipe.named_models
        files = {name: str(converted_folder(model, digests)) for name, model in named.items() if is_convertible(model)}
        places = (named | files).items()
        update = {name: getattr(recipe, name).model_copy(update={"model": folder}) for name, folder in places}
        ggufs = {folder: named[name] for name, folder in files.items()}
        return cls(recipe.model_copy(update=update), layout, settings_of(recipe, digests), ggufs, digests)

    def key(self, *names: str) -> dict[str, Any]:
        """Return the seed and the parts of the recipe that an output depends on."""
        return {"seed": self.recipe.seed, **{name: self.contents[name] for name in names}}

    @property
    def date(self) -> str | None:
        """The day that chat templates of this run print, that of its first data; None if no template prints it."""
        template = self.recipe.policy.chat_template
        named = self.recipe.named_models.items()
        if not any(prints_date(model, template if name == "policy" else None) for name, model in named):
            return None
        made = records(self.layout.root).get("data")
        return str((made and made["settings"].get("date")) or date.today())

    # Models

    @property
    def reference(self) -> str:
        """The folder or hub id of the reference policy."""
        fitted = self.recipe.policy.fit is not None
        return str(self.layout.model("reference")) if fitted else str(self.recipe.policy.model)

    @property
    def reference_inputs(self) -> tuple[Path, ...]:
        """The outputs that must exist before the reference policy can be used."""
        fitted = self.recipe.policy.fit is not None
        return (self.layout.data, self.layout.model("reference")) if fitted else (self.layout.data,)

    def target(self, name: str) -> Target:
        """Return the training folders of the model ``name``."""
        layout, recipe = self.layout, self.recipe
        checkpoints, model = layout.checkpoints(name), layout.model(name)
        return Target(checkpoints, model, recipe.seed, recipe.compute, tuple(recipe.report_to))

    def architecture(self, name: str) -> Scratch | str:
        """Return the architecture of the policy or of a reward; a reward without one of its own has the policy's."""
        source = self.recipe.models[name]
        own = source.scratch or source.model
        return own if own is not None else self.architecture("policy")

    def networks(self, name: str) -> list[Scratch | str]:
        """Return the architectures that the reference or a policy computes with: a guide's comes second."""
        policy, own = self.recipe.policies.get(name), self.architecture("policy")
        guide = None if policy is None else policy.trained_guide
        if guide is None:
            return [own]
        if guide.side is not None:
            return [own, Scratch(hidden=SIDE_WIDTH, layers=SIDE_LAYERS)]
        return [own, own if guide.trunk == "reference" else self.architecture("reward")]

    def scoring_networks(self, *names: str) -> list[Scratch | str]:
        """Return the architectures of those rewards that are models of the run."""
        return [self.architecture(name) for name in names if self.recipe.rewards[name].is_classifier]

    # Rewards

    def scorer(self, name: str) -> Scorer:
        """Return the reward ``name``: reward, judge or gold."""
        source, layout, compute = self.recipe.rewards[name], self.layout, self.recipe.compute
        model = str(layout.model(name)) if source.trained else str(source.model)
        return Scorer(name, source, model, layout.tokenizer, compute, partial(layout.scored, name), self.date)

    def reward_inputs(self, *names: str) -> tuple[Path, ...]:
        """Return the model folders that must exist before the rewards ``names`` can score."""
        return tuple(self.layout.model(name) for name in names if self.recipe.rewards[name].trained)

    # Samples

    def engine(self, name: str) -> EngineSettings:
        """Return what draws from the reference or a policy: the recipe's engine, or our own where it has it not."""
        engine, policy = self.recipe.rollout.engine, self.recipe.policies.get(name)
        guided = policy is not None and policy.trained_guide is not None
        return engine if engine.has(reference=name == "reference", guided=guided) else OWN_ENGINE

    def sampler(self, name: str, model: str) -> Sampler:
        """Return how responses of a model, the reference or a policy, are drawn."""
        return Sampler(model, self.engine(name), self.recipe.rollout.max_new_tokens, self.recipe.compute)

    @property
    def rollout_prompts(self) -> PromptTable:
        """The training prompts that get rollouts."""
        return PromptTable(self.layout.prompts("train"), self.recipe.rollout.prompts)

    @property
    def rollout_parts(self) -> list[PromptTable]:
        """These prompts, in parts that do not depend on the number of processes."""
        parts = ROLLOUT_PARTS if self.recipe.rollout.engine.is_local else 1  # a server batches all prompts itself
        return [replace(self.rollout_prompts, start=part, step=parts) for part in range(parts)]

    @property
    def stored(self) -> StoredRollouts:
        """The rollouts of the training prompts, once they are drawn and scored."""
        k = self.recipe.rollout.k
        parts = (StoredSamples(table, k, self.layout.rollouts(part)) for part, table in enumerate(self.rollout_parts))
        return StoredRollouts(self.layout, tuple(parts), k)

    def sampling_key(self, name: str) -> dict[str, Any]:
        """Return the parts of the recipe that responses of the reference or a policy depend on."""
        rollout, own = self.contents["rollout"], self.engine(name) is OWN_ENGINE
        engine = OWN_ENGINE.model_dump(mode="json") if own else rollout["engine"]
        drawn = {"rollout": {"engine": engine, "max_new_tokens": rollout["max_new_tokens"]}}
        return self.key("policy") | drawn | self.precision

    @property
    def precision(self) -> dict[str, Any]:
        """The precision of drawing and scoring, which their results depend on; nothing where it is float32."""
        dtype = self.recipe.compute.dtype
        return {} if dtype == "float32" else {"compute": {"dtype": dtype}}
