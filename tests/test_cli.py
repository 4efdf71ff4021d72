"""The command line as users and scripts meet it: help, exit codes, one sentence for every mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import micro
import pytest
from micro import COMMAND
from transformers import AutoModelForSequenceClassification

from infalign.pipeline.ownership import MARKER
from infalign.recipe.built_in import built_in, find
from infalign.steps import STAGES

SHORT = {"max_length": 2}  # of what is trained on
HEAVY = {"torch", "transformers", "trl", "datasets", "peft", "matplotlib", "jinja2", "httpx2"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models: a policy, one without EOS, and a classifier with two outputs."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("policy", "mute", "two"):
        micro.write_policy(folder / name)
    AutoModelForSequenceClassification.from_pretrained(folder / "two", num_labels=2).save_pretrained(folder / "two")
    settings = folder / "mute" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    return folder


def recipe(tmp_path: Path, models: Path, **changes: Any) -> str:
    """Return the path of a recipe that trains one policy from the given model."""
    return micro.write(tmp_path / "recipe.yaml", micro.given(tmp_path / "run", str(models / "policy")) | changes)


READS_A_LOG = f"""\
import sys
from pathlib import Path
from infalign.integrations.logs import read_log
read_log(Path("{Path(__file__).parent}/logs/verifiers/traces.jsonl"))
"""
COMMAND_LINE = """\
import sys
sys.argv = 'infalign {}'.split()
from infalign.cli import main
try: main()
except SystemExit as stopped: assert not stopped.code
"""


@pytest.mark.parametrize(
    ("program", "more"),
    [
        (COMMAND_LINE.format("--help"), {"numpy", "scipy", "pyarrow", "pydantic"}),
        (COMMAND_LINE.format("curve --procedure best-of-4 --transform exp:10 --kl 1"), {"pyarrow", "pydantic"}),
        (COMMAND_LINE.format("run demo --dry-run"), {"scipy.stats"}),
        ("import sys, infalign\n", {"numpy"}),
        ("import sys, infalign\n[getattr(infalign, name) for name in [*infalign.__all__, '__version__']]\n", set()),
        ("import sys, infalign\ninfalign.pass_at_k([[0, 1], [1, 1]], 2)\n", {"scipy.optimize", "pandas", "rich"}),
        (READS_A_LOG, {"scipy", "inspect_ai", "lm_eval"}),
    ],
)
def test_nothing_loads_a_heavy_library_that_it_does_not_use(program: str, more: set[str], tmp_path: Path) -> None:
    """``--help`` answers before NumPy can be imported, pass@k before SciPy's optimizers, public names before torch."""
    check = f"loaded = {HEAVY | more} & sys.modules.keys()\nassert not loaded, loaded"
    subprocess.run([sys.executable, "-c", program + check], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_the_installed_command_answers() -> None:
    """The console script gives its version."""
    assert subprocess.check_output([COMMAND, "--version"], text=True).split() == [version("infalign")]


def test_help_of_run_lists_stages_and_built_in_recipes() -> None:
    """Every stage and every recipe of the package is listed with what it is about."""
    out = micro.answer("run", "--help")
    assert all(f"  {stage:<14}{about}\n" in out for stage, about in STAGES.items())
    assert all(f"  {name} " in out and about in out for name, (about, *_) in built_in().items())
    assert max(map(len, out.splitlines())) <= 80


def test_recipes_lists_what_comes_along_and_prints_one_to_start_from() -> None:
    """The list says what a recipe does, takes and needs; what is printed of one is its file, which is a recipe."""
    out = micro.answer("recipes")
    for name, (about, takes, needs) in built_in().items():
        assert f"{name}\n  {about}\n  {takes}\n  {needs}\n" in out
        assert takes.startswith("Takes: ")
        assert needs.startswith("Needs: ")
        assert micro.answer("recipes", name) == find(name).read_text(encoding="utf-8")


def test_every_command_that_takes_a_recipe_takes_its_name(main: Any, tmp_path: Path) -> None:
    """A word means what comes along, wherever one works; a misspelled one is answered with what was probably meant."""
    here = ("--set", f"run_dir={tmp_path / 'run'}")
    assert "100,000 demonstrations" in micro.answer("run", "demo", "--dry-run", *here)
    code, out, _ = main("status", "demo", *here)
    assert (code, f"0 of 27 done in {tmp_path / 'run'}" in out) == (4, True)
    for command in ("run", "recipes"):
        assert "there is no built-in recipe named dmo; did you mean demo?" in micro.refusal(command, "dmo")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run x.yaml --until trian", 'Did you mean "train"?'),
        ("winrate", 'Unknown command "winrate". Did you mean "win-rate"? See `infalign --help`.'),
        ("run x.yaml --dryrun", "Did you mean --dry-run?"),
        ("win-rate --policy a.csv --base b.csv --procedure standard --seed -1", "Must be >= 0"),
        ("run", "RECIPE requires an argument"),
        ("run x.yaml --set", "--set requires an argument"),
        ("run absent.yaml", "cannot read the recipe absent.yaml"),
        ("run recipes/demo.yaml", "No such file or directory; did you mean demo?"),
        ("status runs/nope", "no run directory and no recipe is named runs/nope; give a run_dir or a recipe"),
        ("status dmo", "no run directory and no recipe is named dmo; did you mean demo?"),
        ("serve run --port 70000", '"70000" for --port. Must be <= 65535.'),
        ("serve-reward run --transform exp:1 --port 0", '"0" for --port. Must be >= 1.'),
        ("serve run --port 1.5", "Invalid value for --port: it takes a whole number; found '1.5'."),
        ("choose --procedure best-of-8 --kl 1 --rollouts 2.5", "a whole number; found '2.5'."),
        ("run demo --ray-actors 1.5", "it takes a whole number; found '1.5'."),
        ("run demo --ray-actors 0", '"0" for --ray-actors. Must be >= 1'),
        ("run demo --ray-actors 2 --dry-run", "leave out --dry-run, --policy and --until"),
        ("run demo --ray-actors 2 --until train", "leave out --dry-run, --policy and --until"),
        ("run demo --ray-actors 2 --policy x", "leave out --dry-run, --policy and --until"),
        ("run demo --ray-actors 2 --ray-gpus 1.5", "a fraction below 1 or a whole number; found 1.5"),
        ("run demo --ray-gpus 1", "for the actors of --ray-actors; add it"),
        ("run demo --ray-cpus 4", "for the actors of --ray-actors; add it"),
        ("serve run --most 0", '"0" for --most. Must be >= 1.'),
        ("export absent --to trl --transform exp:10 --kl 1", "absent is not a run directory"),
        ("run demo --set policies.aware.solver=rlo", "found 'rlo'; did you mean rloo?"),
        ("run demo --set rollout.engine.kind=transformer", "did you mean transformers?"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_suggestion(line: str, said: str) -> None:
    """What cannot be parsed is answered with what was probably meant, and no option is ignored."""
    assert said in micro.refusal(*line.split())


def test_a_near_name_in_the_same_folder_is_asked_about(tmp_path: Path) -> None:
    """A recipe is answered with a recipe, a run directory with a run; a file that is there is not."""
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.yaml").touch()
    for words, said in (
        (["run", tmp_path / "reciple.yaml"], f"No such file or directory; did you mean {tmp_path / 'recipe.yaml'}?"),
        (["run", tmp_path / "recipe"], f"No such file or directory; did you mean {tmp_path / 'recipe.yaml'}?"),
        (["run", tmp_path / "other.yaml"], "No such file or directory; `infalign recipes` lists"),
        (["run", tmp_path / "no" / "recipe.yaml"], "No such file or directory; `infalign recipes` lists"),
        (["status", tmp_path / "runs" / "mien"], f"; did you mean {tmp_path / 'runs' / 'mine'}?"),
    ):
        assert said in micro.refusal(*words)


def test_an_unexpected_exception_is_one_line_and_debug_shows_where(main: Any, tmp_path: Path, models: Path) -> None:
    """A failure that nobody foresaw is exit code 1, and its traceback comes with --debug only."""
    (tmp_path / "run" / "digests.json").mkdir(parents=True)
    (tmp_path / "run" / MARKER).touch()
    path = recipe(tmp_path, models)
    assert "unexpected IsADirectoryError" in micro.refusal("run", path, code=1)
    code, _, err = main("run", path, "--debug")
    assert code == 1
    assert "Traceback" in err
    assert "in write_text" in err


@pytest.mark.parametrize(
    ("changes", "code", "said", "absent"),
    [
        ({"data": {"sources": [{"path": "x.jsonl"}], "max_prompt_tokens": 180}}, 3, "x.jsonl does not exist", "data/t"),
        ({"policy": {"model": "MODELS/two"}}, 2, "two contains LlamaForSequenceClassification, not", "rollouts/p"),
        ({"policy": {"model": "MODELS/mute"}}, 2, "mute has no EOS token", "data/tokenizer"),
        ({"policy": {"model": "MODELS"}}, 2, "has no tokenizer that can be loaded", "data/tokenizer"),
        ({"reward": {"model": "MODELS/two"}}, 2, "two has 2 outputs; a reward model must have one", "scores/part-0"),
        ({"policy": {"scratch": micro.SCRATCH, "fit": SHORT}}, 3, "raise policy.fit.max_length", "models/reference"),
        ({"reward": {"model": "MODELS/policy", "fit": SHORT}}, 3, "data or raise fit.max_length", "models/reward"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_half_done(
    main: Any, tmp_path: Path, models: Path, changes: dict[str, Any], code: int, said: str, absent: str
) -> None:
    """Each mistake has its exit code, its place and remedy, and no unfinished output under a final name."""
    changes = json.loads(json.dumps(changes).replace("MODELS", str(models)))
    found, _, err = main("run", recipe(tmp_path, models, **changes), "--until", "score")
    assert (found, err.count("\n")) == (code, 1), err
    assert said in err
    left = [str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*")]
    assert not [path for path in left if path.startswith(absent)]


def test_a_model_of_a_hub_that_cannot_be_reached_is_told_with_the_way_round(tmp_path: Path, models: Path) -> None:
    """The hub is asked once, not for minutes, and the answer says how to bring the model."""
    path = recipe(tmp_path, models, policy={"model": "owner/model"})
    settings = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
    ended = subprocess.run([COMMAND, "run", path], env=settings, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("owner/model is not a local folder")) == (2, 1), ended.stderr
    assert "`hf download owner/model --local-dir FOLDER`" in ended.stderr
    assert "Retrying" not in ended.stderr


@pytest.mark.slow
def test_who_stops_a_run_at_a_terminal_is_told_at_once(tmp_path: Path) -> None:
    """Workers take seconds to end, and until then the terminal says what happens; all get the signal, none is left."""
    changes = {"rollout": {"k": 5000, "max_new_tokens": 12}}
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run") | micro.WORKERS | changes)
    terminal, other_end = os.openpty()
    run = subprocess.Popen(
        [COMMAND, "run", path],
        stdout=subprocess.PIPE,
        stderr=other_end,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below a background job
    )
    os.close(other_end)
    while not (tmp_path / "run" / "stages" / "sft.started").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate()  # returns when no process holds the pipe any more
    assert run.returncode == 130
    first, then = os.read(terminal, 10_000).decode().strip().splitlines()
    assert first == "infalign: stopping; once more stops at once"
    assert "interrupted; rerun the same command to resume" in then
    os.close(terminal)


def test_what_others_print_is_not_in_the_output() -> None:
    """Whether Python, C or another process prints it, it goes to stderr; afterwards stdout is stdout again."""
    program = (
        "import os; from infalign.cli.options import own_stdout\n"
        "with own_stdout() as out:\n"
        "    print('python'); os.write(1, b'C\\n'); os.system('echo shell'); print('answer', file=out)\n"
        "print('after')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "answer\nafter\n"
    assert sorted(ended.stderr.split()) == ["C", "python", "shell"]
