"""``infalign init``: a first recipe of one's own, which is valid, says what it means and runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import micro
import pytest

from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.reading import load_recipe
from infalign.theory.choose import choose
from infalign.world import dialogues, preferences


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model."""
    folder = tmp_path_factory.mktemp("models")
    scratch = Scratch(**micro.SCRATCH | {"context": 512})
    tokenizer = train_tokenizer((reply for _, reply in dialogues(100, seed=0)), scratch)
    new_policy(scratch, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def project(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a user: rows, demonstrations alone, a reward and a small model."""
    monkeypatch.chdir(tmp_path)
    with Path("rows.jsonl").open("w") as rows, Path("told.jsonl").open("w") as told:
        for prompt, chosen, rejected in preferences(120, seed=0, temperature=1.0):
            print(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}), file=rows)
            print(json.dumps({"prompt": prompt, "completion": chosen}), file=told)
    Path("my_reward.py").write_text("def score(prompts, responses):\n    return [len(r) for r in responses]\n")
    shutil.copytree(model, "model")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "reward"), [("rows.jsonl", "my_reward.py:score"), ("questions.jsonl", "my_checker.py:check")]
)
def test_a_first_recipe_runs_as_the_command_says(main: Any, questions: Path, rows: str, reward: str) -> None:
    """From own rows, a model's folder and a reward in a file to the report, with what ``init`` says comes next."""
    out = micro.answer("init", "--data", rows, "--policy", "./model", "--reward", reward)
    assert out == "Wrote recipe.yaml. Next:\n  infalign run recipe.yaml --dry-run\n  infalign run recipe.yaml\n"
    assert main("run", "recipe.yaml", "--dry-run")[0] == 0
    small = [
        "rollout={prompts: 16, k: 6, max_new_tokens: 8}",
        "evaluate={prompts: 6, samples: 8, max_n: 4}",
        *(["judge.head.pairs=30"] if rows == "rows.jsonl" else []),
        "policies.aware.fit={batch_size: 8}",
        "policies.ordinary.fit={batch_size: 8}",
        "compute={device: cpu, threads: 1}",
        "allow_worthless=true",
    ]
    out = micro.answer("run", "recipe.yaml", *(word for change in small for word in ("--set", change)))
    results = json.loads((questions / "runs" / "recipe" / "results.json").read_text())
    assert ("pass_at_k" in results) == (rows == "questions.jsonl") == ("aware − ordinary, " in out)
    assert (questions / "runs" / "recipe" / "report.html").is_file()


@pytest.mark.parametrize(
    ("policy", "reward", "learned", "rates"),
    [
        ("scratch", None, "fit", {2e-3, 5e-4, None}),
        ("someone/model", None, "head", {None}),
        ("./model", "my_reward.py:score", "head", {None}),
        ("./model", "http://127.0.0.1:5000/get_reward", "head", {None}),
        ("./model", "someone/reward", "head", {None}),
    ],
)
def test_only_a_new_model_has_learning_rates_in_its_recipe(
    main: Any, project: Path, policy: str, reward: str | None, learned: str, rates: set[float | None]
) -> None:
    """Policies find theirs, in the form that suits the model. The judge learns from pairs."""
    words = [] if reward is None else ["--reward", reward]
    assert main("init", "--data", "rows.jsonl", "--policy", policy, *words)[0] == 0
    recipe = load_recipe("recipe.yaml")
    fits = [recipe.policy.fit, recipe.reward.fit, *(policy.fit for policy in recipe.policies.values())]
    assert {fit.learning_rate for fit in fits if fit is not None} == rates
    aware = recipe.policies["aware"]
    assert (aware.fit.lora is None, aware.guide is None) == (policy == "scratch", policy != "scratch")
    assert (recipe.rollout.prompts, recipe.rollout.minutes) == (4000, 10)
    assert recipe.judge is not None
    assert getattr(recipe.judge, learned) is not None


@pytest.mark.parametrize("procedure", ["best-of-8", "worst-of-2", "rewind:0.5:40", "standard"])
def test_the_recipe_has_the_best_transformation_for_its_procedure(main: Any, project: Path, procedure: str) -> None:
    """What `choose` ranks first of those that need no file; the ordinary one has the reward itself at that budget."""
    words = ["--data", "world", "--policy", "scratch", "--procedure", procedure, "--kl-budget", "0.4"]
    assert main("init", *words)[::2] == (0, "")
    recipe = load_recipe("recipe.yaml")
    assert recipe.procedure.name == procedure
    aware = recipe.policies["aware"]
    found = choose(recipe.procedure, kl=0.4, rollouts=recipe.rollout.k).candidates
    named = {one.transform.name: one.behind for one in found if not one.transform.name.startswith("optimal")}
    assert aware.transformation == min(named, key=lambda name: named[name])
    assert {policy.budget for policy in recipe.policies.values()} == {0.4}
    assert list(recipe.policies) == (["aware"] if procedure == "standard" else ["aware", "ordinary"])


def test_data_without_pairs_needs_a_reward_and_has_no_judge(main: Any, project: Path) -> None:
    """Demonstrations alone teach no reward; with one given the recipe is valid and names no judge."""
    said = "told.jsonl has no preference pairs to train a reward on (other columns: none)"
    assert said in micro.refusal("init", "--data", "told.jsonl", "--policy", "./model")
    assert main("init", "--data", "told.jsonl", "--policy", "./model", "--reward", "my_reward.py:score")[0] == 0
    assert load_recipe("recipe.yaml").judge is None
    Path("A/told").mkdir(parents=True)  # what the hub has under this id, with an invalid row
    Path("A/told/train.jsonl").write_text(f"{Path('told.jsonl').read_text()}{{}}\n")
    words = ("init", "--data", "A/told", "--policy", "./model", "--reward", "my_reward.py:score", "--out", "hub.yaml")
    assert main(*words)[0] == 0
    recipe = load_recipe("hub.yaml")
    assert (recipe.judge, recipe.data.sources[0].hub.id) == (None, "A/told")


@pytest.fixture
def questions(project: Path) -> Path:
    """Return the working directory with questions, a checker, and functions that are none."""
    rows = [{"prompt": f"What is {n} + {n}?", "completion": f"{n}", "answer": f"{2 * n}"} for n in range(60)]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("my_checker.py").write_text(
        "def check(responses, answer):\n    return [len(r) % 2 == int(a) % 3 for r, a in zip(responses, answer)]\n"
        "def graded(responses):\n    assert len(responses) == 40\n    return [0.01 for said in responses]\n"
        "def other(responses, solution):\n    return [1.0 for said in responses]\n"
        "def same(responses):\n    return [False for said in responses]\n"
        "def rare(responses):\n    return [said == '59' for said in responses]\n"
    )
    return project


@pytest.mark.parametrize(
    ("policy", "lengths"), [(["--policy", "./model"], (50, 51)), ([], (256, 256)), (["--policy", "scratch"], (256, 48))]
)
def test_a_checker_leads_to_pass_at_k(main: Any, questions: Path, policy: list[str], lengths: tuple[int, int]) -> None:
    """It tries the checker, whose truth values are numbers, at once; the lengths fit the model; no word is of pairs."""
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 101}))
    words = ["--data", "questions.jsonl", "--reward", "my_checker.py:check", "--procedure", "best-of-32", *policy]
    assert main("init", *words)[::2] == (0, "")
    recipe, text = load_recipe("recipe.yaml"), Path("recipe.yaml").read_text()
    assert (recipe.evaluate.truth, recipe.judge, recipe.evaluate.max_n) == ("reward", None, 32)
    assert [policy.budget for policy in recipe.policies.values()] == [0.1, 0.1]
    assert recipe.policies["ordinary"].transform.name == "raw"
    assert "transform: optimal  " in text
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens) == lengths
    assert "pass@k" in text
    assert not any(word in text for word in ("pairs", "judge"))


@pytest.mark.parametrize(("reward", "truth", "transform"), [("graded", None, "exp:"), ("rare", "reward", "optimal")])
def test_a_graded_reward_is_no_checker(main: Any, questions: Path, reward: str, truth: Any, transform: str) -> None:
    """And a function that says right or wrong is one, also if none of the rows that are tried first is right."""
    assert main("init", "--data", "questions.jsonl", "--reward", f"my_checker.py:{reward}")[0] == 0
    recipe = load_recipe("recipe.yaml")
    assert recipe.evaluate.truth == truth
    assert recipe.policies["aware"].transform.name.startswith(transform)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("my_checker.py", "--reward my_checker.py names no function; add :function, such as my_checker.py:check"),
        ("my_checker.py:chek", "my_checker.py has no function chek"),
        ("my_checker.py:other", "needs the column solution, which is missing in every row; there are answer"),
        ("my_checker.py:same", "same gives 0 to the responses of the first 60 rows and to `?` alike; make it tell"),
    ],
)
def test_a_checker_that_cannot_be_used_is_named_at_once(main: Any, questions: Path, reward: str, said: str) -> None:
    """A file without a function, one that is not there, a column that no row has, one verdict; nothing is written."""
    code, out, err = main("init", "--data", "questions.jsonl", "--reward", reward)
    assert (code in (2, 3), out, err.count("\n")) == (True, "", 1)
    assert said in err
    assert not Path("recipe.yaml").exists()


def test_any_file_name_makes_a_recipe(project: Path) -> None:
    """Signs of YAML and of the shell in the name of the file are quoted, in the recipe and in the commands."""
    out = micro.answer("init", "--data", "world", "--policy", "scratch", "--out", "my: #1.yaml")
    assert "infalign run 'my: #1.yaml'\n" in out
    assert load_recipe("my: #1.yaml").run_dir == "runs/my: #1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "scratch"], "parameter --data requires an argument"),
        (["--data", "absent.jsonl", "--policy", "scratch"], "absent.jsonl does not exist"),
        (["--data", "data/absent.jsonl", "--policy", "scratch"], "data/absent.jsonl does not exist"),
        (["--data", "world", "--policy", "scratch", "--procedure", "best"], "unknown procedure 'best'"),
        (["--data", "world", "--policy", "scratch", "--kl-budget", "0"], "KL"),
        (["--data", "world", "--policy", "scratch", "--out", "no/where.yaml"], "the folder no does not exist"),
        (["--data", "world", "--policy", "scratch", "--out", "my_reward.py"], "my_reward.py already exists"),
    ],
)
def test_an_answer_that_cannot_be_writes_nothing(main: Any, project: Path, words: list[str], said: str) -> None:
    """One sentence says what is wrong, and no file is made or changed."""
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file() and "cache" not in str(path)}
    code, out, err = main("init", *words)
    assert (code, out, err.count("\n")) == (code or -1, "", 1), err
    assert said in err
    after = {path: path.read_bytes() for path in project.rglob("*") if path.is_file() and "cache" not in str(path)}
    assert after == before
