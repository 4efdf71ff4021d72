"""Recipes: what is read, what is changed by --set, and how each mistake is named."""

from pathlib import Path
from typing import Any

import micro
import pytest

from infalign.core.errors import ConfigError
from infalign.models.settings import Fit, Lora
from infalign.pipeline.units import Identity, identify
from infalign.recipe.built_in import built_in, find
from infalign.recipe.reading import dump_recipe, load_recipe, read_yaml
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.training.solvers.guide import Guide, Side

RECIPES = [find(name) for name in built_in()]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a good recipe."""
    return micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))


def problem(path: str | Path, *overrides: str) -> str:
    """Return what loading a recipe complains about."""
    with pytest.raises(ConfigError) as raised:
        load_recipe(path, list(overrides))
    return str(raised.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_comes_along_is_valid(recipe: Path) -> None:
    """Each loads with a run directory of its name, and what is dumped of it loads as the same."""
    loaded = load_recipe(recipe)
    assert loaded.run_dir == f"runs/{recipe.stem}"
    assert Recipe.model_validate(read_yaml(dump_recipe(loaded))) == loaded


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.kk=3", "unknown key `rollout.kk`; did you mean `k`?"),
        ("policies.aware.fit.lora.rnk=3", "unknown key `policies.aware.fit.lora.rnk`; did you mean `rank`?"),
        ("policies.fit={beta: 1, sovler: rloo}", "unknown key `policies.fit.sovler`; did you mean `solver`?"),
        ("rollout.engine={kind: server, comand: x}", "unknown key `rollout.engine.comand`; did you mean `command`?"),
        ("policies.plain.n=4", "`policies.plain`: n is for the solver bon-sft or bonbon, found qrpo"),
        ("rollout.k=1", "`rollout.k`: Input should be greater than or equal to 2, found 1"),
        (f"policy.fit.batch_size={2**64}", "`policy.fit.batch_size`: must be a whole number of at most 64 bits"),
        ("policy.fit.epochs=true", "`policy.fit.epochs`: cannot be true or false, found True"),
        ("data=[]", "`data` takes settings: folder, sources"),
        ('run_dir="a\\0"', "`run_dir`: text with NUL or half a surrogate pair cannot be stored; found 'a\\x00'"),
        (f"policies.{'a' * 101}={{beta: 1}}", f"`policies.{'a' * 101}`: String should have at most 100 characters"),
        ("policies={../x: {beta: 1}}", "`policies.../x`: a name can contain letters, digits, - and _ only"),
        ("policy.scratch.context=50", "data.max_prompt_tokens + rollout.max_new_tokens is 192"),
        ("policies.aware.transform=square", "`policies.aware.transform`: unknown transformation 'square'"),
        ("policies.aware.transform=exp:1000", "`policies.aware.transform`: exp:t needs a finite t"),
        ("policies.aware.kl_budget=800", "policies.aware: exp:10 cannot reach a KL of 800 nats"),
        ("policies={judge: {beta: 1}, sft: {beta: 1}}", "a policy cannot be named judge, sft, which the run uses"),
        ("evaluate.rewind=rewind:0.85:4", "`evaluate`: rewind:0.85:4 needs 12 samples, found 8"),
        ("procedure=rewind:0.5:4", "evaluate.rewind is rewind:0.75:4; it must be the procedure, rewind:0.5:4"),
        ("procedure=top-2-of-200", "evaluate.samples: top-2-of-200 cannot be estimated from"),
        ("data.sources=[{reasoning_gym: a}]", "`data.sources.0`: reasoning_gym requires size"),
        ("rollout.engine={command: x}", "`rollout.engine`: command is for the engine server, found shared-prefix"),
        ("policies.aware.beta=1", "`policies.aware`: give exactly one of kl_budget, beta"),
        ("evaluate.max_n=9", "`evaluate`: Best-of-9 cannot be estimated from 8 samples"),
        ("procedure=best-of-5", "evaluate.max_n (4) must be at least the N of best-of-5"),
        ("data.sources=[{world: 3, limit: 2}]", "`data.sources.0`: limit is for sources that are read; world and"),
        ("data.sources=[{path: x, data_dir: y}]", "unknown key `data.sources.0.data_dir`"),
        ("data.sources=[{world: 3, path: x}]", "`data.sources.0`: give exactly one of path, hub, world"),
        ("data.sources=[{reasoning_gym: a, size: 5, path: x}]", "`data.sources.0`: give exactly one of path, hub, "),
        ("rollout.engine={kind: server, command: 'vllm \"serve'}", "`rollout.engine.command`: No closing quotation"),
        ("reward={}", "`reward`: a reward model needs `fit` or `head` unless it is a `function`"),
        ("reward={url: 'localhost:5000'}", "`reward.url`: a URL must start with http:// or https://"),
        ("reward={url: 'http://a', function: 'b:c'}", "`reward`: give `function` or `url`, not both"),
        ("reward={url: 'http://a', model: b/c}", "`reward`: a `url` is used as it is"),
        ("reward={function: 'a:b', api_key_env: KEY}", "`reward`: api_key_env requires a `url`"),
        ("reward={model: mine.py}", "`reward`: mine.py is no model; for a function in it, write mine.py:NAME as"),
    ],
)
def test_what_a_setting_cannot_be_is_named_with_its_place(path: str, override: str, said: str) -> None:
    """An unknown key, a wrong type, a value out of range and settings that contradict each other."""
    assert problem(path, override).startswith(f"{path}: {said}")


TOGETHER = {
    "{solver: bon-sft}": "`policies.new.n` is missing",
    "{solver: bonbon, n: 4, kl_budget: 1}": "kl_budget is for the solver qrpo or ",
    "{solver: bonbon, n: 1}": "Input should be greater than or equal to 2, found 1",
    "{solver: bon-sft, n: 7}": "policies.new: the best of 7 needs rollout.k of at least 7",
    "{solver: bon-sft, n: 2, objective: reward}": "objective is for the solver maxk, found bon-sft",
    "{solver: ipo, transform: log, beta: 1}": "transform is for the solver qrpo or ",
    "{solver: ipo}": "give exactly one of kl_budget, beta",
    "{solver: qrpo, transform: rawest, kl_budget: 1}": "raw-prompt",
    "{solver: maxk, kl_budget: 1, generations: 2}": "best-of-4 needs generations and rollout.k of at least 4",
    "{solver: bond, beta: 1}": "bond has no beta; give the kl_budget at which it stops",
    "{solver: bond, kl_budget: 1, fit: {lora: {rank: 4}}}": "bond uses a whole model as its moving anchor",
    "{solver: ppo, beta: 1, generations: 5}": "fit.batch_size 32 must be a multiple of generations 5",
    "{beta: 1, guide: {}, fit: {lora: {rank: 2}}}": "a guide is trained whole; leave guide or fit.lora out",
    "{beta: 1, guide: {trunk: reward, side: {}}}": "a guide with side needs the trunk reference, found reward",
    "{solver: distil, teacher: nobody}": "teacher is nobody, which is not an offline policy of this recipe",
    "{solver: distil, teacher: online}": "teacher is online, which is not an offline policy of this recipe",
    "{solver: distil, teacher: new}": "teacher is new, which is not an offline policy of this recipe",
}


@pytest.mark.parametrize(("override", "said"), TOGETHER.items())
def test_settings_of_a_policy_that_do_not_go_together_are_refused(path: str, override: str, said: str) -> None:
    """A strength or an option of another solver, and parts that exclude each other."""
    assert said in " ".join(problem(path, f"policies.new={override}").split())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["{beta: 1, guide: {trunk: reward}}", "reward={function: 'a:b'}"], "the reward is not a model"),
        (["{solver: maxk, kl_budget: 1}", "procedure=2nd-best-of-4"], "worst-of-N; the procedure is 2nd-best-of-4"),
        (["{beta: 1}", "gold=null", "evaluate={truth: gold}"], "evaluate.truth is gold, but the recipe has no gold"),
        (["{beta: 1}", "rollout.kk=3", "seed=-1"], "found -1; unknown key `rollout.kk`; did you mean `k`?"),
        (["{beta: 1}", "reward=null", "policies=[1]", "policies.0=null"], "`reward` takes settings: "),
    ],
)
def test_what_another_part_of_the_recipe_does_not_allow_is_an_error(path: str, overrides: list[str], said: str) -> None:
    """Without it the policy would have been taken; all mistakes are told at once."""
    policy, *others = overrides
    load_recipe(path, [f"policies.new={policy}"])
    assert said in problem(path, f"policies.new={policy}", *others)


def test_set_changes_nested_settings_list_entries_and_absent_parents(path: str) -> None:
    """A dotted key reaches into mappings and lists, and makes mappings that the recipe leaves out."""
    overrides = ["rollout.k=16", "data.sources.0.world=7", "policy.fit.lora.rank=4", "policies.new.beta=0.5"]
    recipe = load_recipe(path, [*overrides, "compute.threads=null", "policy.fit.learning_rate=1e-4"])
    assert (recipe.rollout.k, recipe.data.sources[0].world, recipe.compute.threads) == (16, 7, None)
    assert recipe.policies["new"].beta == 0.5
    assert recipe.policy.fit is not None
    assert recipe.policy.fit.lora is not None
    assert (recipe.policy.fit.lora.rank, recipe.policy.fit.learning_rate) == (4, 1e-4)


@pytest.mark.parametrize("name", ["raw", "identity", "aware-student"])
def test_set_takes_a_policy_out(name: str) -> None:
    """Of those that the recipe has, not the last; an empty entry of the recipe itself is a mistake."""
    whole = load_recipe("preferences")
    left = load_recipe("preferences", [f"policies.{name}=null"])
    assert whole.policies.keys() - left.policies.keys() == {name}
    with pytest.raises(ConfigError, match=f"--set policies.{name}: the recipe has no policy {name}; it has aware, "):
        load_recipe("preferences", [f"policies.{name}=null"] * 2)
    with pytest.raises(ConfigError, match="`policies`: Dictionary should have at least 1 item"):
        load_recipe("preferences", [f"policies.{other}=null" for other in whole.policies])


def test_set_changes_one_of_the_places_of_a_yaml_alias(path: str) -> None:
    """Two policies may share their settings by an alias; an override of one leaves the other."""
    assert "*id" in Path(path).read_text()
    recipe = load_recipe(path, ["policies.aware.fit.epochs=3"])
    assert recipe.policies["aware"].fit.epochs == 3
    assert recipe.policies["plain"].fit.epochs == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.k", "--set takes key=value, found 'rollout.k'"),
        ("data.sources.world=3", "--set data.sources.world: data.sources is a list of 1; use a number"),
        (f"data.sources.{'9' * 5000}.world=3", f"--set data.sources.{'9' * 5000}.world: data.sources is a list of 1"),
        (
            "rollout={k: 3, k: 4}",
            "--set rollout: '{k: 3, k: 4}' is not a YAML value: line 1: while constructing a mapping found duplicate",
        ),
        ("seed.x=3", "--set seed.x: seed has no keys"),
        ("rollout.k=[1", "--set rollout.k: '[1' is not a YAML value"),
    ],
)
def test_an_override_that_fits_nowhere_is_refused(path: str, override: str, said: str) -> None:
    """A --set without a value, beyond a list or into a number says so."""
    recipe = Path(path)
    recipe.write_text(recipe.read_text() + "seed: 1\n")
    assert problem(path, override).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"run_dir: [", "is not valid YAML"),
        (b"\xff\xfe\xff", "is not valid YAML"),
        (b"", "has no settings"),
        (b"1: 2", "unknown key `1`"),
        (b"a: 1\nb: {c: 1, 'c': 2}", 'line 2: while constructing a mapping found duplicate key "c"'),
        (b"a:\n\tb: 1", "line 2: while scanning for the next token found character '\\t'"),
        (b"a: !!int ''", "is not valid YAML"),
        (b"a: x" * 40_000, "is not a recipe: it has more than 100,000 bytes"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    """Bad YAML, Python tags, other text and other values than mappings are named with the file."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    found = problem(path)
    assert str(path) in found
    assert said in found


def test_a_word_is_a_built_in_recipe_and_all_else_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the working directory hides ``demo``; with a folder in front or its ending, it is the file."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.yaml"):
        micro.write(tmp_path / name, micro.settings(Path("mine")))
    assert load_recipe("demo").run_dir == "runs/demo"
    for path in ("./demo", "demo.yaml", tmp_path / "demo"):
        assert load_recipe(path).run_dir == "mine"
    assert "did you mean tldr-tiny?" in problem("tldr-tny")
    for absent in (tmp_path / "absent.yaml", tmp_path):
        assert "cannot read the recipe" in problem(absent)


NEW: dict[str, Any] = {"scratch": {}, "fit": {}}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, (1e-3, 1e-3, 1e-3)),
        ({"policy": {"model": "m", "fit": {}}}, (2e-5, 2e-5, 2e-5)),
        ({"policy": {"model": "m", "fit": {"lora": {}}}}, (2e-4, 2e-5, 2e-5)),
        ({"policy": {"model": "m", "fit": {"learning_rate": 0.1}}}, (0.1, 2e-5, 2e-5)),
        ({"policy": {"model": "m"}, "reward": NEW}, (None, 1e-3, 2e-5)),
        ({"reward": {"model": "m", "fit": {"lora": {}}}}, (1e-3, 2e-4, 1e-3)),
    ],
)
def test_a_learning_rate_left_open_suits_the_weights(changes: dict[str, Any], rates: tuple[float | None, ...]) -> None:
    """New weights get the largest, pretrained ones the smallest, an adapter on them one between; it is written down."""
    recipe = Recipe.model_validate(micro.settings(Path("run")) | changes)
    fits = (recipe.policy.fit, recipe.reward.fit, recipe.policies["online"].fit)
    assert tuple(fit and fit.learning_rate for fit in fits) == rates


@pytest.mark.parametrize(
    ("policy", "given", "fit", "guide"),
    [
        ({"scratch": micro.SCRATCH, "fit": {}}, {}, Fit(batch_size=128), Guide()),
        ({"model": "m"}, {}, Fit(batch_size=64, device_batch_size=8, lora=Lora()), None),
        ({"model": "m"}, {"fit": {}}, Fit(), None),
        ({"model": "m"}, {"guide": {"side": {}}}, Fit(), Guide(side=Side())),
    ],
)
def test_the_form_suits_the_model(policy: dict[str, Any], given: dict[str, Any], fit: Fit, guide: Guide | None) -> None:
    """If left open, a guide for one from nothing, an adapter for a pretrained one; rate and length stay open."""
    changes = {"policy": policy, "policies": {"aware": {"kl_budget": 1.0, **given}}}
    recipe = Recipe.model_validate(micro.settings(Path("run")) | changes)
    for read in (recipe, Recipe.model_validate(recipe.model_dump(mode="json"))):
        aware = read.policies["aware"]
        assert (aware.fit, aware.guide) == (fit, guide)
        assert (fit.learning_rate, fit.epochs) == (None, None)


HIDDEN_IN_URLS = ("user:hidden@host", "hidden@host/", "host/?access_token=hidden", "host/?pass=hidden")
HIDDEN_IN_URLS += ("host/#access_token=hidden", "host/?api%5Fkey=hidden", "host/?a=1;token=hidden")
HIDDEN_IN_ENGINES = (
    *("url: 'https://host/?api_key=hidden'", "url: 'user:hidden@host'", "api_key_env: sk-hidden"),
    *("command: 'vllm serve {model} --api-key hidden'", "command: 'env VLLM_API_KEY=hidden vllm serve'"),
    "command: 'serve --header \"Authorization: Bearer hidden\"'",
)


@pytest.mark.parametrize(
    "override",
    [f"judge={{url: 'http://{url}'}}" for url in HIDDEN_IN_URLS]
    + [f"rollout.engine={{kind: server, {setting}}}" for setting in HIDDEN_IN_ENGINES],
)
def test_a_secret_in_a_recipe_is_refused_and_not_shown(path: str, override: str) -> None:
    """A recipe is recorded, shown in the report and in errors; none of them ever holds a secret."""
    said = problem(path, override)
    assert "api_key_env" in said
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", "no"), ("0123", 123), ("1:30", "1:30"), ("2024-13-01", "2024-13-01"), ("1e-4", 1e-4), ("0o17", 15)],
)
def test_yaml_is_of_version_1_2(text: str, value: object) -> None:
    """A country is no switch, a leading zero not octal, a colon not to base 60, and a date is text."""
    assert read_yaml(text) == value


def test_a_command_may_name_tokens_and_key_files(path: str) -> None:
    """Options that only sound like a secret pass."""
    command = "vllm serve {model} --tokenizer t --max-num-batched-tokens 100 --ssl-keyfile k --port {port}"
    recipe = load_recipe(path, [f"rollout.engine={{kind: server, command: '{command}'}}"])
    assert recipe.rollout.engine.model_dump()["command"] == command


@pytest.mark.parametrize(("given", "policy"), [({}, "shared-prefix"), ({"command": "vllm serve {model}"}, "server")])
def test_a_server_draws_what_it_has(given: dict[str, str], policy: str, tmp_path: Path) -> None:
    """One that is there has the reference, one that is started any model without a guide; the rest is drawn here."""
    settings = micro.settings(tmp_path / "run")
    settings["rollout"] |= {"engine": {"kind": "server", **given}}
    settings["policies"]["guided"] = settings["policies"]["aware"] | {"guide": {"trunk": "reference"}}
    run = Run.of(Recipe.model_validate(settings))
    assert [run.engine(name).kind for name in ("reference", "aware", "guided")] == ["server", policy, "shared-prefix"]
    assert run.sampling_key("guided")["rollout"]["engine"] == {"kind": "shared-prefix"}


def test_where_a_server_runs_and_how_it_is_asked_change_no_key(tmp_path: Path) -> None:
    """Whoever corrects an address or a command keeps the rollouts; another kind of engine is another key."""

    def found(**engine: Any) -> dict[str, Identity]:
        settings = micro.settings(tmp_path / "run")
        settings["rollout"] |= {"engine": {"kind": "server"} | engine}
        return identify(whole_run.units(Run.of(Recipe.model_validate(settings))))

    assert found(in_flight=1) == found() == found(in_flight=500, seed="none", url="http://127.0.0.1:9000")
    assert found(command="vllm serve {model}") == found(command="vllm serve {model} --max-model-len 9", api_key_env="K")
    assert found()["rollout-0"] != found(kind="transformers")["rollout-0"]
