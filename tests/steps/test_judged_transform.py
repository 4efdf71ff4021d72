"""``transform: judged``: a run finds the transformation that wins most by its judge, and trains on it."""

from pathlib import Path

import micro
import numpy as np
import pyarrow.parquet as pq
import pytest

from infalign.core.errors import ConfigError
from infalign.evaluation.judge import estimated_judge
from infalign.evaluation.pairing import judged_samples
from infalign.method.procedures import BestOfN
from infalign.method.shapings import Ranked
from infalign.method.transforms import parse_transform
from infalign.pipeline.records import records
from infalign.recipe.data_dependent import reference_rewards
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.theory.law import judged_win_rate, law_at_kl
from infalign.theory.optimum import optimal_by
from infalign.training.solvers.theory import stored_beta


def settings(root: Path) -> dict:
    """Return a recipe whose reward and judge disagree, with a judged policy and its student."""
    recipe = micro.settings(root)
    recipe |= {"reward": {"function": f"{micro.__file__}:brightness"}, "judge": micro.GOLD, "gold": None}
    recipe["rollout"] = {"prompts": 32, "k": 16, "max_new_tokens": 12}
    aware = recipe["policies"]["aware"] | {"transform": "judged", "kl_budget": 0.5}
    student = {"solver": "distil", "teacher": "aware", "fit": aware["fit"]}
    recipe["policies"] = {"student": student, "aware": aware}
    return recipe


@pytest.mark.slow
def test_a_run_trains_on_what_wins_most_by_its_judge(tmp_path: Path) -> None:
    """The judge's scores are those of the rollouts themselves, and the table is the optimum by the judge's estimate."""
    path = micro.write(tmp_path / "recipe.yaml", settings(tmp_path / "run"))
    code, _, err = micro.infalign("run", path, "--until", "train", "--debug")
    assert (code, err) == (0, "")
    judged = pq.read_table(tmp_path / "run" / "judged.parquet").to_pandas()
    scores = pq.read_table(tmp_path / "run" / "scores" / "part-0.parquet").to_pandas()
    assert judged["prompt_id"].nunique() == 8
    for prompt, rows in judged.groupby("prompt_id"):
        assert rows["reward"].tolist() == scores[scores["prompt_id"] == prompt]["reward"].tolist()
    estimated = estimated_judge(judged_samples(tmp_path / "run" / "judged.parquet"), BestOfN(4))
    expected = optimal_by(estimated.judge, BestOfN(4), kl=0.5)
    table = parse_transform(str(tmp_path / "run" / "transforms" / "aware.json"))
    law = law_at_kl(table, kl=0.5)
    assert judged_win_rate(law, BestOfN(4), estimated.judge) == pytest.approx(expected.win_rate, abs=1e-6)
    for name in ("aware", "student"):
        trained_on = tmp_path / "run" / "models" / name / "transformation.json"
        assert trained_on.read_text() == (tmp_path / "run" / "transforms" / "aware.json").read_text()
    beta = stored_beta(Ranked(table), reference_rewards(Layout(tmp_path / "run")), 0.5)  # some rewards tie
    assert beta == pytest.approx(law.beta, rel=0.1)
    assert records(tmp_path / "run")["train-aware"]["summary"]["beta"] == pytest.approx(beta)
    _, again, _ = micro.infalign("run", path, "--set", "policies.aware.kl_budget=0.4", "--dry-run")
    redone = " ".join(line.partition("(")[0] for line in again.splitlines() if line.startswith("again: "))
    assert {"transform-aware", "train-aware", "train-student"} <= {*redone.replace(",", "").split()}
    assert not {"judged", "transform-student"} & {*redone.replace(",", "").split()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judge": None}, "policies.aware: transform is judged, but the recipe has no judge; add one"),
        (
            {"rollout": {"prompts": 32, "k": 7, "max_new_tokens": 12}},
            "transform is judged, which needs rollout.k of at least 8",
        ),
        ({"procedure": "rewind:0.75:4"}, "needs a procedure by rank, not rewind:0.75:4"),
    ],
)
def test_what_a_judge_cannot_tell_is_refused(changes: dict, said: str) -> None:
    """The message names the policy and what is missing."""
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate(settings(Path("run")) | changes)


def test_it_is_an_optimum_at_a_kl() -> None:
    """A β is refused."""
    recipe = settings(Path("run"))
    del recipe["policies"]["aware"]["kl_budget"]
    recipe["policies"]["aware"]["beta"] = 0.1
    with pytest.raises(ValueError, match="transform is judged, the optimum at a KL; give kl_budget, not beta"):
        Recipe.model_validate(recipe)
    with pytest.raises(ConfigError, match="is known only after the run has computed it"):
        Recipe.model_validate(settings(Path("run"))).policies["aware"].shaping(np.zeros(2), np.arange(4.0))
