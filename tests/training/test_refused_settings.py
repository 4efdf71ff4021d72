"""Settings of a policy that do not go together: a recipe is refused on reading, and says what to do."""

from pathlib import Path
from typing import Any

import micro
import pytest

from infalign.core.errors import ConfigError
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe

ELSEWHERE = {
    "{solver: bon-sft}": "`policies.new.n` is missing",
    "{solver: bonbon, n: 4, kl_budget: 1}": "kl_budget is for the solver qrpo or ",
    "{solver: bonbon, n: 1}": "Input should be greater than or equal to 2, found 1",
    "{solver: bon-sft, n: 7}": "policies.new: the best of 7 needs rollout.k of at least 7",
    "{solver: ipo, loss: squared, beta: 1}": "loss is for the solver qrpo, found ipo",
    "{solver: ipo, transform: log, beta: 1}": "transform is for the solver qrpo or ",
    "{solver: ipo}": "give exactly one of kl_budget, beta",
    "{solver: qrpo, transform: rawest, kl_budget: 1}": "raw-prompt",
    "{solver: maxk, kl_budget: 1, generations: 2}": "best-of-4 needs generations and rollout.k of at least 4",
    "{solver: bond, beta: 1}": "bond has no beta; give the kl_budget at which it stops",
    "{solver: bond, kl_budget: 1, fit: {lora: {rank: 4}}}": "bond uses a whole model as its moving anchor",
    "{solver: ppo, beta: 1, generations: 5}": "fit.batch_size 32 must be a multiple of generations 5",
    "{beta: 1, guide: {}, fit: {lora: {rank: 2}}}": "a guide takes guide.lora; leave fit.lora out",
    "{beta: 1, guide: {trunk: reward, lora: {}}}": "a guide with lora needs the trunk reference, found reward",
    "{beta: 1, guide: {trunk: reward, side: {}}}": "a guide with side needs the trunk reference, found reward",
    "{beta: 1, guide: {lora: {}, top_tokens: 8}}": "gives every token its own Q; leave top_tokens out",
    "{beta: 1, guide: {lora: {}, side: {}}}": "an adapter (lora) or a small network (side), not both",
    "{beta: 1, guide: {side: {hidden: 8, heads: 3}}}": "hidden (8) must be a multiple of 2 × heads (3)",
    "{solver: distil, teacher: nobody}": "teacher is nobody, which is not an offline policy of this recipe",
    "{solver: distil, teacher: online}": "teacher is online, which is not an offline policy of this recipe",
    "{solver: distil, teacher: new}": "teacher is new, which is not an offline policy of this recipe",
}


@pytest.mark.parametrize(("override", "said"), ELSEWHERE.items())
def test_a_setting_that_a_solver_does_not_take_is_an_error(tmp_path: Path, override: str, said: str) -> None:
    """A strength or an option of another solver, and parts that exclude each other."""
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path))
    with pytest.raises(ConfigError, match="recipe") as error:
        load_recipe(path, [f"policies.new={override}"])
    assert said in " ".join(str(error.value).split())


REWARD_TRUNK = {"guide": {"trunk": "reward"}}


@pytest.mark.parametrize(
    ("policy", "change", "said"),
    [
        ({"solver": "qrpo", "beta": 1} | REWARD_TRUNK, {"reward": micro.GOLD}, "the reward is not a model"),
        (
            {"solver": "maxk", "kl_budget": 1},
            {"procedure": "2nd-best-of-4"},
            "maxk supports best-of-N and worst-of-N; the procedure is 2nd-best-of-4",
        ),
    ],
)
def test_a_policy_that_cannot_work_in_a_recipe_is_an_error(
    policy: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What it needs is another part of the recipe, without which it would have been taken."""
    settings = micro.settings(tmp_path) | {"policies": {"new": policy}}
    Recipe.model_validate(settings)
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate(settings | change)
