"""`infalign export`: the data of other trainers, and how they are started."""

import shlex
import shutil
from pathlib import Path

import micro
import pyarrow.parquet as pq
import pytest
from rows import written
from safetensors.torch import load_file, save_file

from infalign.method.optimum import Optimal, optimum
from infalign.method.shapings import shape_rollouts
from infalign.recipe.layout import Layout
from infalign.recipe.reading import read_yaml, write_yaml
from infalign.recipe.settings import Recipe
from infalign.recipe.stored_laws import reference_rewards
from infalign.steps.status import recorded_recipe
from infalign.theory.aims import tilted


def words(run: Path, to: str = "trl", transform: str = "exp:10") -> tuple[object, ...]:
    """Return the command line that exports a run."""
    return "export", run, "--to", to, "--transform", transform, "--kl", 0.5


def test_trls_data_are_the_calibrated_prompts(calibrated_run: Path) -> None:
    """Prompt, id and reference rewards of every prompt, and a command with the β that spends the budget."""
    out = micro.answer(*words(calibrated_run))
    path = calibrated_run / "export" / "trl" / "train.parquet"
    columns = ["prompt", "prompt_id", "reference_rewards", "columns"]
    calibrated = pq.read_table(calibrated_run / "calibrated.parquet", columns=columns)
    assert pq.read_table(path).to_pylist() == calibrated.to_pylist()
    where, environment, command = out.splitlines()
    assert where == f"# {path}"
    assert shlex.split(environment) == ["export", f"INFALIGN_REWARD={calibrated_run}", "INFALIGN_TRANSFORM=exp:10"]
    assert shlex.split(command)[:2] == ["trl", "rloo"]
    (beta,) = (word for word in shlex.split(command) if word.startswith("--beta="))
    stored = reference_rewards(Layout(calibrated_run))  # with ties
    expected = tilted(stored, "exp:10", kl=0.5).beta
    assert float(beta.removeprefix("--beta=")) == pytest.approx(expected, rel=1e-5)


def test_the_optimum_leaves_the_run_as_a_spelling(calibrated_run: Path) -> None:
    """Trainers read the shaping that the run's stored rewards have, at its β; graded rewards ask for an objective."""
    out = micro.answer(*words(calibrated_run, transform="optimal:reward"))
    _, environment, command = map(shlex.split, out.splitlines())
    stored = reference_rewards(Layout(calibrated_run))
    best = optimum(stored, recorded_recipe(calibrated_run).procedure, kl=0.5, objective="reward")
    shaping = Optimal.parse(environment[2].removeprefix("INFALIGN_TRANSFORM="))
    assert shaping == best.shaping
    assert shape_rollouts(shaping, stored).tolist() == best.shaped_PK.tolist()
    assert f"--beta={best.beta:.6g}" in command
    assert "name the objective" in micro.refusal(*words(calibrated_run, transform="optimal"))


@pytest.mark.parametrize(("template", "lost"), [("plain", "chat template"), (None, "day")])
def test_a_lost_template_is_refused(calibrated_run: Path, tmp_path: Path, template: str | None, lost: str) -> None:
    """Trainers read the reference's own folder, so its prompts would be others than those that were ranked."""
    settings = read_yaml((calibrated_run / "recipe.yaml").read_text())
    folder = shutil.copytree(settings["policy"]["model"], tmp_path / "policy")
    if template is None:
        (folder / "chat_template.jinja").write_text("{{ strftime_now('%d') + messages[0].content + eos_token }}")
    settings |= {"policy": {"model": str(folder), "chat_template": template}}
    (tmp_path / "recipe.yaml").write_text(write_yaml(settings | {"run_dir": str(tmp_path)}))
    assert f"lacks the {lost} of the run" in micro.refusal(*words(tmp_path))


def test_a_true_answer_of_several_types_is_refused(calibrated_run: Path, tmp_path: Path) -> None:
    """A table has one type per column, and verl's has the answer outside of JSON."""
    asked = [{"prompt": f"What is {n} + {n}?", "answer": n if n % 2 else "none"} for n in range(60)]
    source = {"path": str(written(tmp_path / "rows.jsonl", asked))}
    data = {"sources": [source], "max_prompt_tokens": 180, "test_fraction": 0.3}
    policy = read_yaml((calibrated_run / "recipe.yaml").read_text())["policy"]["model"]
    settings = micro.given(tmp_path / "run", policy) | {"data": data}
    micro.done(Recipe.model_validate(settings), until="calibrate")
    said = "no table for verl, as a column of the data has values of several types"
    assert said in micro.refusal(*words(tmp_path / "run", "verl"), code=3)
    assert not list((tmp_path / "run" / "export").rglob("*.parquet"))


def test_a_run_that_is_not_calibrated_is_refused(calibrated_run: Path, tmp_path: Path) -> None:
    """The step to run is named."""
    (tmp_path / "recipe.yaml").write_text((calibrated_run / "recipe.yaml").read_text())
    assert "calibrated.parquet does not exist" in micro.refusal(*words(tmp_path, "verl"), code=3)


def test_a_reference_with_other_weights_is_refused(calibrated_run: Path, tmp_path: Path) -> None:
    """The rewards were ranked among the rollouts of the model that had its name."""
    run = Path(shutil.copytree(calibrated_run, tmp_path / "run"))
    settings = read_yaml((run / "recipe.yaml").read_text())
    folder = Path(shutil.copytree(settings["policy"]["model"], tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * values for name, values in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    settings["policy"]["model"] = str(folder)
    (run / "recipe.yaml").write_text(write_yaml(settings | {"run_dir": str(run)}))
    said = "calibrated.parquet was made before a change: the content of policy.model changed; rerun"
    assert said in micro.refusal(*words(run), code=3)
