"""The rank model: trained on ranks of rollouts, measured on held-out prompts, and a reward where there are none."""

import shutil
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from scipy.special import logit
from scipy.stats import spearmanr

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.diagnostics import rank_correlations
from infalign.method.calibration import calibrate
from infalign.method.reward import PredictedRankReward
from infalign.method.transforms import Exponential, Function, Log
from infalign.pipeline.records import records
from infalign.pipeline.units import Identity, identify
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.rewards.classifier import ClassifierReward
from infalign.sampling.rollouts import read_rollouts
from infalign.steps import whole_run
from infalign.steps.rank_model import rank_model_start
from infalign.steps.run import Run

pytestmark = pytest.mark.slow
K = 24


def last(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return a reward that is in the text: the number of its last character."""
    return [float(ord(response[-1])) if response else 0.0 for response in responses]


def constant(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return the same reward for every response."""
    return [1.0] * len(responses)


def settings(root: Path) -> dict[str, Any]:
    """Return a recipe with a rank model; the reward is a function of the text."""
    return micro.settings(root) | {
        "data": {"sources": [{"world": 80}], "max_prompt_tokens": 180},
        "reward": {"function": "test_rank_model:last"},
        "judge": micro.GOLD,
        "rollout": {"prompts": 40, "k": K, "max_new_tokens": 12},
        "rank_model": {"fit": micro.FIT | {"epochs": 6, "learning_rate": 1e-2, "batch_size": 16}},
        "policies": {"plain": {"kl_budget": 0.5, "fit": micro.FIT}},
        "compute": {"device": "cpu", "threads": 1},
        "report_to": [],
    }


def recipe(folder: Path, *overrides: str) -> Recipe:
    """Return the recipe with changes."""
    return load_recipe(micro.write(folder / "recipe.yaml", settings(folder / "run")), list(overrides))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run up to its rank model."""
    folder = tmp_path_factory.mktemp("predicted")
    micro.done(recipe(folder), until="train")
    return folder


def summary(folder: Path, unit: str) -> dict[str, Any]:
    """Return what a unit of the run recorded."""
    return records(folder / "run")[unit]["summary"]


def test_the_held_out_quality_is_that_of_the_saved_model(finished: Path) -> None:
    """Squared errors and Spearman's correlation are those of models/rank on prompts that its training did not see."""
    asked, root, k = recipe(finished), finished / "run", K
    said: list[list[str]] = []
    prompts: list[Any] = []
    rewards: list[Any] = []
    for part, table in enumerate(Run.of(asked).rollout_parts):
        of_part = table.read()
        texts = read_rollouts(Layout(root).rollouts(part), of_part.prompt_ids, k)["text"].to_pylist()
        prompts += of_part.conversations
        said += [texts[i : i + k] for i in range(0, len(texts), k)]
        rewards += [last([], row) for row in said[len(rewards) :]]
    model = ClassifierReward.load(Layout(root).model("rank"))
    errors, halves, correlations = [], [], []
    for i in range(0, 40, 10):
        u = 1 / (1 + np.exp(-np.array(model([prompts[i]] * k, said[i]))))
        ranks = np.array([np.mean([(a > b) + (a == b) / 2 for b in rewards[i]]) for a in rewards[i]])
        errors.append(np.mean((u - ranks) ** 2))
        halves.append(np.mean((0.5 - ranks) ** 2))
        correlations.append(spearmanr(u, ranks).statistic)
    found = summary(finished, "rank-model")
    assert (found["held_out_prompts"], found["rollouts"], found["rollouts_too_long"]) == (4, 36 * k, 0)
    assert found["squared_error"]["mean"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["squared_error_of_half"]["mean"] == pytest.approx(np.mean(halves))
    assert found["rank_correlation"]["mean"] == pytest.approx(np.mean(correlations))


def test_a_rank_that_is_in_the_text_is_learned(finished: Path) -> None:
    """Where the reward is the last character, held-out ranks are predicted much better than by 1/2, and in order."""
    found = summary(finished, "rank-model")
    assert found["squared_error"]["mean"] < 0.5 * found["squared_error_of_half"]["mean"]
    assert found["rank_correlation"]["mean"] > 0.5


def test_settings_of_the_rank_model_decide_what_is_done_again(finished: Path) -> None:
    """Another rank model costs its training, and no policy's."""

    def keys(*overrides: str) -> dict[str, Identity]:
        return identify(whole_run.units(Run.of(recipe(finished, *overrides))))

    before, after, without = keys(), keys("rank_model.fit.epochs=2"), keys("rank_model=null")
    assert {name for name in before if before[name] != after[name]} == {"rank-model"}
    assert [name for name in without if before[name] != without[name]] == []
    assert micro.done(recipe(finished), until="train") == []


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("rank_model.model=some/model", "some/model"),
        ("reward={fit: {}}", "run/models/reward"),
        ("reward={model: ready/reward}", "ready/reward"),
        ("seed=0", "run/models/reference"),
    ],
)
def test_the_rank_model_starts_from_the_nearest_model(tmp_path: Path, override: str, start: str) -> None:
    """That is its own, else the reward model, trained or ready; where the reward is a function the reference policy."""
    run = Run.of(recipe(tmp_path, override, "run_dir=run"))
    assert rank_model_start(run, run.recipe.rank_model) == start


def test_too_few_prompts_with_an_order_are_said_before_training(finished: Path, tmp_path: Path) -> None:
    """A constant reward ties all rollouts: there is no rank to predict, and the rank model is not trained."""
    shutil.copytree(finished / "run", tmp_path / "run")
    changes = ["reward.function=test_rank_model:constant", "policies={sft: {solver: bon-sft, n: 2}}"]
    with pytest.raises(
        DataError, match="only 0 of the 4 prompts held out from the rank model have rollouts with different"
    ):
        micro.done(recipe(tmp_path, *changes), until="train")
    assert not Layout(tmp_path / "run").model("rank").exists()


def test_correlations_are_spearman_s() -> None:
    """With ties on either side they agree with SciPy's; predictions that all tie have 0."""
    rng = np.random.default_rng(0)
    rewards_PK = rng.integers(5, size=(20, 9)).astype(float)
    predicted_PK = (rewards_PK + rng.integers(-3, 4, size=(20, 9))) / 10
    ranks_PK = calibrate(rewards_PK, np.sort(rewards_PK, axis=1))
    expected = [spearmanr(*pair).statistic for pair in zip(predicted_PK, rewards_PK, strict=True)]
    assert rank_correlations(predicted_PK, ranks_PK) == pytest.approx(expected)
    assert rank_correlations(np.full((1, 4), 0.5), np.array([[0.125, 0.375, 0.625, 0.875]])) == 0


def test_the_predicted_rank_is_transformed() -> None:
    """Outputs whose sigmoids are 1/4 and 1/2 give e^{10(u−1)}, for text and messages; the mean of u is logged."""
    outputs = {"a": float(logit(0.25)), "b": 0.0}
    reward = PredictedRankReward(lambda prompts, responses: [outputs[r] for r in responses], Exponential(10))
    logged: dict[str, float] = {}
    found = reward(["p", "p"], ["a", [{"role": "assistant", "content": "b"}]], log_metric=logged.__setitem__)
    assert found == pytest.approx([np.exp(-7.5), np.exp(-5.0)])
    assert logged == {"win_rate": pytest.approx(0.375)}
    assert reward.__name__ == "exp:10"


@pytest.mark.parametrize(
    ("output", "transform", "said"),
    [
        (np.nan, Exponential(10), "response 1: the rank model's output is nan"),
        (np.inf, Exponential(10), "output is inf and exp:10 of its sigmoid 1.0"),
        (-800.0, Log(), "output is -800.0 and log of its sigmoid -inf"),
        (40.0, Function("odds", lambda u: u / (1 - u)), "odds of its sigmoid inf"),
    ],
)
def test_what_is_not_finite_is_no_reward(output: float, transform: Any, said: str) -> None:
    """An output or a value of Φ that is not finite is an error that names the response."""
    with pytest.raises(DataError, match=said):
        PredictedRankReward(lambda prompts, responses: [0.0, output], transform)(["p", "p"], ["a", "b"])
    with pytest.raises(DataError, match=r"returned shape \(1,\) for 2 responses"):
        PredictedRankReward(lambda prompts, responses: [0.0], transform)(["p", "p"], ["a", "b"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rank_model={}"], "`rank_model.fit` is missing"),
        (["policies.rank={kl_budget: 1}"], "a policy cannot be named rank"),
    ],
)
def test_settings_that_do_not_fit_the_rank_model_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    """It needs a training, and its name."""
    with pytest.raises(ConfigError) as raised:
        recipe(tmp_path, *overrides)
    assert said in str(raised.value)
