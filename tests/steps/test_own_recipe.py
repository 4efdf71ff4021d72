"""A recipe of one's own: a reward in a file beside it, a model without a chat template, and no more than is needed."""

import json
import random
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from rows import written
from transformers import AutoTokenizer

from infalign.core.display import share
from infalign.core.errors import ConfigError
from infalign.core.storage import read_table
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.worth import worth
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.records import records
from infalign.recipe.fingerprints import Digests, settings_of
from infalign.recipe.reading import dump_recipe, load_recipe
from infalign.recipe.settings import Recipe
from infalign.rewards.sources import function_reward
from infalign.steps.run import Run

REWARD = "def score(prompts, responses):\n    return [float(len(response)) for response in responses]\n"
CHECKER = """\
def score(responses, answer):
    return [None if true is None else float(len(response) % 4 == true) for response, true in zip(responses, answer)]
"""
RECORDS = ("calibrate", "evaluate-reference", "evaluate-aware")
LEFT_OUT = 3  # of the questions one in so many has no answer: 3 of 12 training prompts, and 3 of 6 test prompts


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("bare")
    micro.write_policy(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def least(model: Path) -> dict[str, Any]:
    """Return a recipe with as little as a run needs: data, a model used as it is, a reward, a policy."""
    return {
        "run_dir": "run",
        "data": {"sources": [{"world": 60}], "max_prompt_tokens": 180},
        "policy": {"model": str(model), "chat_template": "plain"},
        "reward": {"function": "my_reward.py:score"},
        "rollout": {"prompts": 12, "k": 6, "max_new_tokens": 6},
        "policies": {"aware": {"transform": "exp:10", "kl_budget": 0.5, "fit": micro.FIT | {"epochs": 8}}},
        "evaluate": {"prompts": 6, "samples": 8, "max_n": 4},
        "compute": {"device": "cpu", "threads": 1},
    }


def test_questions_with_answers_and_a_checker_are_enough_and_run_from_another_folder(
    main: Any, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pairs, judge, rewind, fine-tuning and chat template; prompts whose reward is None are left out."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_reward.py").write_text(CHECKER)
    rows = [{"prompt": f"What is {n}?", "answer": n % 4 if n % LEFT_OUT else None} for n in range(60)]
    source = {"path": str(written(tmp_path / "questions.jsonl", rows))}
    data = {"sources": [source], "test_fraction": 0.3, "max_prompt_tokens": 180}
    recipe = least(bare) | {"data": data}
    recipe["policies"]["aware"] |= {"transform": "optimal", "kl_budget": 0.2}
    path = micro.write(project / "recipe.yaml", recipe)
    monkeypatch.chdir(tmp_path)
    out = micro.answer("run", path)
    assert "the only judge is the reward used in training" in out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["judges"] == ["reward"]
    made = {name: json.loads((tmp_path / "run" / "stages" / f"{name}.json").read_text()) for name in RECORDS}
    assert {name: record["summary"]["left_out"] for name, record in made.items()} == dict.fromkeys(RECORDS, 3)
    assert (made["calibrate"]["summary"]["prompts"], results["prompts"]) == (9, 3)
    assert "calibrate, evaluate-reference, evaluate-aware: 3 prompts left out because the reward returned None" in out
    assert results["truth"] == {"by": "reward", "threshold": None, "served": 4}
    assert set(results["pass_at_k"]) == {"reference", "aware"}
    assert set(results["policies"]["aware"]["win_rates"]["reward"]) >= {"standard", "best-of-4", "rewind:0.5:4"}
    assert "the only judge is the reward used in training" in (tmp_path / "run" / "report.html").read_text()
    references = read_table(tmp_path / "run" / "calibrated.parquet")["reference_rewards"].to_pylist()
    best = optimum(references, BestOfN(4), kl=0.2)
    assert records(tmp_path / "run")["train-aware"]["summary"]["beta"] == best.beta
    counts = Counts(np.sum(references, axis=1), len(references[0]))
    limit = share(worth(counts, "best-of-4", [0.2], known=True)[0].law.as_dict())
    assert out.index("0 (reference)") < out.index(limit) < out.index("train-aware")
    assert "Upper bounds at a KL budget" in (tmp_path / "run" / "report.html").read_text()
    redone = main("status", path, "--set", "procedure=best-of-2", "--json")[1]
    assert "train-aware" in redone
    theirs = shutil.copytree(tmp_path / "run" / "models" / "aware", "theirs")
    code, out, err = main("run", path, "--policy", theirs, "--set", "allow_worthless=true")
    assert code == 0, err
    (measured,) = (tmp_path / "run" / "evaluation").glob("theirs.*/results.json")
    beside = json.loads(measured.read_text())["pass_at_k"]
    assert set(beside) == {"reference", "aware", measured.parent.name}
    assert beside["aware"]["4"]["mean"] == results["pass_at_k"]["aware"]["4"]["mean"]
    assert f"{measured.parent.name} " in out[out.index("The probability that at least one of k responses") :]
    template = AutoTokenizer.from_pretrained(tmp_path / "run" / "models" / "aware").chat_template
    assert template == load_tokenizer(bare, template="plain").chat_template
    # The recorded recipe means the same file from anywhere, and the place of the file does not count.
    monkeypatch.chdir("/")
    assert main("status", tmp_path / "run")[0] == 0
    shutil.copytree(project, tmp_path / "elsewhere")
    moved = load_recipe(tmp_path / "elsewhere" / "recipe.yaml", [f"run_dir={tmp_path / 'run'}"])
    words = ("status", tmp_path / "elsewhere" / "recipe.yaml", "--set", f"run_dir={tmp_path / 'run'}")
    assert main(*words)[0] == 0
    (tmp_path / "elsewhere" / "my_reward.py").write_text(CHECKER.replace("float", "int"))
    code, out, _ = main(*words, "--json")
    assert (code, "the content of reward.function (my_reward.py:score) changed" in out) == (4, True)
    assert moved.reward.function == f"{tmp_path / 'elsewhere' / 'my_reward.py'}:score"
    monkeypatch.chdir(tmp_path)
    code, _, err = main("run", path, "--set", "policies.aware.kl_budget=7")
    assert code != 0
    assert "policies.aware: a KL of 7 nats cannot be spent" in err
    assert f"below {best.largest_kl:.4g}" in err


OWN_PROCEDURE = """
import numpy as np
from infalign.method.procedures import BestOfN

class Mine:
    distortion, density, weights, serving = (
        lambda self, *given, own=own: getattr(BestOfN(4), own)(*given)
        for own in ("distortion", "density", "weights", "serving")
    )
"""


def test_the_file_of_an_own_procedure_belongs_to_what_depends_on_it(tmp_path: Path) -> None:
    """It lies beside the recipe, which is read again from what is recorded, and its content counts, not its place."""
    found = []
    for place, text in (("here", OWN_PROCEDURE), ("there", OWN_PROCEDURE), ("there", f"{OWN_PROCEDURE}# changed\n")):
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "own_procedure.py").write_text(text)
        for name in ("own_procedure.py:Mine", "0.5*own_procedure.py:Mine+0.5*standard"):
            micro.write(folder / "recipe.yaml", micro.settings(folder / "run") | {"procedure": name})
            recipe = load_recipe(folder / "recipe.yaml")
            (folder / "recorded.yaml").write_text(dump_recipe(recipe))
            assert load_recipe(folder / "recorded.yaml") == recipe
            assert recipe.procedure.name == name
            found.append(settings_of(recipe, Digests(tmp_path / "digests"))["procedure"])
    assert found[:2] == found[2:4]
    assert all(before != after for before, after in zip(found[2:4], found[4:], strict=True))


@pytest.mark.slow
def test_a_run_of_an_own_procedure_finds_what_the_built_in_one_does(tmp_path: Path, main: Any) -> None:
    """A file that says what Best-of-4 does: training, results and served answers are those of best-of-4."""
    (tmp_path / "own_run.py").write_text(OWN_PROCEDURE)
    policy, found, said = micro.write_policy(tmp_path / "policy"), [], []
    for name in ("best-of-4", "own_run.py:Mine"):
        recipe = micro.given(tmp_path / f"run-{len(found)}", policy) | {"procedure": name}
        recipe["policies"] |= {"best": {"transform": "optimal:win-rate", "kl_budget": 0.3, "fit": micro.FIT}}
        assert main("run", micro.write(tmp_path / "recipe.yaml", recipe))[0] == 0
        results = (tmp_path / f"run-{len(found)}" / "results.json").read_text().replace(name, "the procedure")
        said.append(main("generate", recipe["run_dir"], "--prompt", "Make 10 from 9 3 7 1")[1])
        found.append(json.loads(results)["policies"])
    assert said[0] == said[1]
    for policy in ("aware", "best"):
        one, other = (numbers[policy] for numbers in found)
        assert one["beta"] == pytest.approx(other["beta"], rel=1e-9)
        for judge, wins in one["win_rates"].items():
            assert wins["the procedure"] == pytest.approx(other["win_rates"][judge]["the procedure"], abs=1e-12)


def test_a_file_of_the_recipe_lies_beside_it_and_one_of_set_in_the_working_directory(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative files become absolute where the recipe is read; a module stays a module."""
    (tmp_path / "there").mkdir()
    path = micro.write(tmp_path / "there" / "recipe.yaml", least(bare))
    monkeypatch.chdir(tmp_path)
    changes = ["judge.function=here.py:score", "policy.chat_template=here.jinja", "gold={function: a.b:c}"]
    recipe = load_recipe(path, changes)
    named = [source.function for source in (recipe.reward, recipe.judge, recipe.gold)]
    assert named == [f"{tmp_path / 'there' / 'my_reward.py'}:score", f"{tmp_path / 'here.py'}:score", "a.b:c"]
    assert recipe.policy.chat_template == str(tmp_path / "here.jinja")
    (tmp_path / "recorded.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recorded.yaml") == recipe


def test_a_function_of_a_file_is_imported_once_and_errors_name_the_file(tmp_path: Path) -> None:
    """A file is a module of its own, dataclasses included; an import that fails is named."""
    file = tmp_path / "mine.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Two:\n    value: float = 2.0\n" + REWARD)
    reward = function_reward(f"{file}:score")
    assert reward([], ["abc"]) == [3.0]
    assert function_reward(f"{file}:score").function is reward.function
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):  # a failed import leaves nothing behind that a second one would find
        with pytest.raises(ConfigError, match=r"importing .*broken\.py raised ZeroDivisionError in broken\.py, line 1"):
            function_reward(f"{tmp_path / 'broken.py'}:score")


SCRIPT = """
from dataclasses import dataclass
from pathlib import Path
import {neighbor}
@dataclass
class Row:
    text: str
def longer(row):
    return float(len(row.text + Path(__file__).with_name("more.txt").read_text())) + {neighbor}.MORE
def score(prompts, responses):
    return list(map(longer, map(Row, responses)))
if __name__ == "__main__":
    raise SystemExit("a script")
"""


def test_a_file_is_loaded_as_a_script_and_processes_that_it_starts_find_it(tmp_path: Path) -> None:
    """With its neighbor and its data, two of one name, and with a library's name."""
    for folder, more in (("one", 1), ("my-other", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "more.txt").write_text("." * 10 * more)
        (tmp_path / folder / f"rules_{more}.py").write_text(f"MORE = {more}")
        for name in ("check", "random"):
            (tmp_path / folder / f"{name}.py").write_text(SCRIPT.format(neighbor=f"rules_{more}"))
    files = ("one/check.py", "one/random.py", "my-other/check.py", "my-other/random.py")
    scores = [function_reward(f"{tmp_path / file}:score").function for file in files]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert [pool.submit(score, [], ["abc"]).result() for score in scores] == [[14], [14], [25], [25]]
    assert Path(random.__file__).parent == Path(json.__file__).parents[1]  # Python's own


def test_the_plain_template_ends_a_response_with_eos_and_its_prompt_begins_the_conversation(bare: Path) -> None:
    """What is sampled from continues to what is trained on, token by token, and ends where the model stops."""
    tokenizer = load_tokenizer(bare, template="plain")
    prompt, reply = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Hello."}
    ids = prompt_ids(tokenizer, [prompt])[0]
    whole = conversation_ids(tokenizer, [[*prompt, reply]])[0]
    assert whole[: len(ids)] == ids
    assert tokenizer.decode(ids) == "User:\nHi\n\nAssistant:\n"
    answer = tokenizer.decode(whole[len(ids) :])
    assert answer.removesuffix("\n\n") == f"Hello.{tokenizer.eos_token}"


def test_a_template_comes_from_a_file_and_is_part_of_what_data_depends_on(bare: Path, tmp_path: Path) -> None:
    """Another template is other data; where no template is named, the key of a run is as it was without the setting."""
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    tokenizer = load_tokenizer(bare, template=str(file))
    prompt = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(prompt_ids(tokenizer, [prompt])[0]) == "[Hi]"
    path = micro.write(tmp_path / "recipe.yaml", least(bare))
    runs = [Run.of(load_recipe(path, [f"policy.chat_template={given}"])) for given in (file, "plain", "null")]
    ours, plain, none = (run.key("policy")["policy"] for run in runs)
    assert ours["chat_template"] != plain["chat_template"]
    assert "chat_template" not in none
    with pytest.raises(ConfigError, match=r"cannot read the chat template .*absent\.jinja"):
        load_tokenizer(bare, template="absent.jinja")
    with pytest.raises(ConfigError, match=r"has no chat template; .* set policy\.chat_template to plain or to a file"):
        load_tokenizer(bare)


@pytest.mark.parametrize(
    ("settings", "rewind"),
    [
        ({}, "rewind:0.85:32"),
        ({"evaluate": {"samples": 16}}, "rewind:0.85:8"),
        ({"evaluate": {"samples": 8, "max_n": 4}}, "rewind:0.5:4"),
        ({"procedure": "rewind:0.5:4"}, "rewind:0.5:4"),
        ({"procedure": "rewind:0.5:4", "evaluate": {"samples": 16}}, "rewind:0.5:4"),
        ({"evaluate": {"rewind": "rewind:0.5:2"}}, "rewind:0.5:2"),
    ],
)
def test_rewind_needs_no_setting(bare: Path, settings: dict[str, Any], rewind: str) -> None:
    """What is evaluated besides is the procedure itself if it rewinds, or what the samples are enough for."""
    assert Recipe.model_validate(least(bare) | {"evaluate": {}} | settings).evaluate.rewind.name == rewind
