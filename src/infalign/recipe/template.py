"""A first recipe from five answers: data, policy, reward, procedure and KL budget; commented, and checked."""

import os
import re
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from shlex import quote

from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.data.examples import parse_example
from infalign.data.files import READERS, read_rows
from infalign.data.sets import SETS, part_file
from infalign.evaluation.settings import read_procedure
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import is_extreme, rewinds
from infalign.models.conversion import is_gguf
from infalign.models.settings import is_hub_id
from infalign.recipe.reading import recipe_of, write_yaml
from infalign.rewards.function import function_reward, is_file
from infalign.theory.choose import choose

LOOKED_AT = 1000  # rows of a file
ROLLOUTS = {True: 64, False: 32}  # K for a policy from scratch, and for a pretrained one
TEMPLATE = re.compile(r'"chat_template":\s*["\[]')  # in a tokenizer's settings: one, or several by name
STUDENT = {True: "4.0e-4", False: "2.0e-4, device_batch_size: 8, lora: {rank: 16}"}
LEARNED = {  # rewards that the pairs teach
    "fit": """\
  # a Bradley–Terry model of the pairs, starting from the policy
  fit: {epochs: 1, batch_size: 16, learning_rate: RATE, max_length: 512}""",
    "head": "  head: {pairs: 4000}      # Bradley–Terry on states of the frozen policy: no rate to choose",
}
NO_JUDGE = "# judge: {function: my_judge.py:score}   # evaluates what the reward has not seen; as a reward is given"
POLICY_SCRATCH = """\
  scratch: {vocabulary: 2048, hidden: 128, layers: 3, heads: 4, context: 512}
  fit: {epochs: 2, batch_size: 8, learning_rate: 2.0e-3, max_length: 256}"""
SFT = "fit: {epochs: 1, batch_size: 16, device_batch_size: 4, learning_rate: 1.0e-4, lora: {rank: 16}}"
TUNED = {  # by whether the model has a chat template
    True: f"\n  # {SFT}",
    False: f"\n  chat_template: plain     # the model has none; a Jinja file is taken too\n  {SFT}",
}
GUIDED_SCRATCH = """\
    guide: {trunk: TRUNK}
    fit: {epochs: 1, batch_size: 128, learning_rate: 1.0e-3}"""
GUIDED = """\
    guide: {lora: {rank: 16}}
    fit: {epochs: 1, batch_size: 64, device_batch_size: 8, learning_rate: 2.0e-4}   # 1e-3 spoils such models"""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a recipe is for, as the command line spells it."""

    data: str  # a file, a public set, `world`, or a hub id
    policy: str  # a model, or `scratch`
    reward: str | None  # `fit`, `head`, FILE.py:function, module:function, a URL or a model; None: what the data allows
    procedure: str
    kl_budget: float


def write_first_recipe(answers: Answers, path: Path) -> list[str]:
    """Write the recipe of ``answers`` to a new file and return the commands that come next.

    Raises as `checked` does, and nothing is written then.
    """
    write_text(path, checked(answers, path))
    named = answers.data in SETS and not part_file("data", answers.data, "train").is_file()
    fetch = [f"infalign data get {answers.data}"] * named
    return [*fetch, f"infalign run {_called(path)} --dry-run", f"infalign run {_called(path)}"]


def checked(answers: Answers, path: Path) -> str:
    """Return the text of the recipe for a new file, which was read as every recipe is.

    Raises ConfigError for a file that is there, and for an answer that cannot be; DataError for data that cannot be
    read.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already and is not overwritten; choose another --out")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to")
    text = first_recipe(answers, path)
    recipe_of(text.encode(), path)
    return text


def first_recipe(answers: Answers, path: Path) -> str:
    """Return the text of a recipe that lies at ``path``."""
    scratch, has_pairs = answers.policy == "scratch", _has_pairs(answers.data)
    template = scratch or _has_template(answers.policy)
    learned = "head" if template and not scratch else "fit"
    given = answers.reward or (learned if has_pairs else "")
    if not has_pairs and given in ("", *LEARNED):
        asked = f"a reward of --reward {given} learns from" if given else "a reward learns from; give --reward"
        raise ConfigError(f"{answers.data} has no preference pairs, which {asked}")
    procedure, budget, k = read_procedure(answers.procedure), answers.kl_budget, ROLLOUTS[scratch]
    most = procedure.n if is_extreme(procedure) else 1
    samples = rewind_samples(procedure) if rewinds(procedure) else 2 * most
    transform = _best_transform(answers.procedure, budget, k)
    how = GUIDED_SCRATCH.replace("TRUNK", "reward" if given == "fit" else "reference") if scratch else GUIDED
    ordinary = f"""
  ordinary:                # ordinary RLHF, to compare with
    transform: identity
    kl_budget: {budget}
{how}"""
    judge = f"judge:                     # only evaluates; learns from other pairs\n{_source(learned, scratch, path)}"
    return f"""\
# {answers.data}, served as {answers.procedure}: written by `infalign init`.
# Every key, with its meaning: infalign recipes --explain KEY, such as policies.NAME.kl_budget.
run_dir: {_quoted(f"runs/{path.stem}")}
procedure: {answers.procedure}   # how the policy will be served

data:
{_data(answers.data)}
  max_prompt_tokens: {48 if answers.data == "world" else 256}   # longer prompts are left out and counted

policy:                    # with `fit` it is first tuned on demonstrations, or on the chosen responses
{POLICY_SCRATCH if scratch else f"  model: {_quoted(answers.policy)}{TUNED[template]}"}

reward:                    # ranks responses, in training and when the policy is served
{_source(given, scratch, path)}

{judge if has_pairs else NO_JUDGE}

rollout: {{prompts: 256, k: {k}, max_new_tokens: {48 if scratch else 128}}}   # K responses per prompt

policies:
  aware:                   # trained for the way it is served
    transform: {transform}
    kl_budget: {budget}         # nats per response; more wins more, and moves further away
{how}{"" if transform == "identity" else ordinary}
  # student:               # aware as one plain model, which any server loads
  #   {{solver: distil, teacher: aware, fit: {{epochs: 1, batch_size: 64, learning_rate: {STUDENT[scratch]}}}}}

evaluate: {{prompts: 96, samples: {max(64, samples)}, max_n: {max(16, most)}}}
compute: {"{device: cpu, processes: 2, threads: 1}" if scratch else "{device: auto}"}
"""


@cache
def _best_transform(procedure: str, kl: float, k: int) -> str:
    """Return the transformation that `infalign choose` finds best of those that a recipe can spell."""
    found = choose(read_procedure(procedure), kl=kl, rollouts=k).candidates
    spelled = [candidate for candidate in found if not candidate.transform.name.startswith("optimal")]
    if not spelled:
        raise ConfigError(f"no transformation that has a name can spend {kl} nats; give a smaller --kl-budget")
    return min(spelled, key=lambda candidate: candidate.behind).transform.name


def _called(path: Path) -> str:
    """Return how a command calls the recipe at ``path``: a word would be one that comes along."""
    return quote(str(path) if path.suffix in (".yaml", ".yml") or path.name != str(path) else f"./{path}")


def _has_pairs(data: str) -> bool:
    """Return whether data has preference pairs; the hub's is taken to have some. Raises DataError for invalid rows."""
    if data in SETS or data == "world":
        return True
    file = data.startswith(".") or data.endswith((*READERS,))
    if not Path(data).exists() and is_hub_id(data) and "/" in data and not file:
        return True
    examples = [parse_example(row, where) for where, row in islice(read_rows(data), LOOKED_AT)]
    return any(example.rejected is not None for example in examples)


def _data(data: str) -> str:
    if data in SETS:
        trained = [name for name in SETS[data].parts if name in ("train", "demonstrations")]
        return f"""\
  folder: data             # where `infalign data get` puts it
  sources: [{", ".join(f"{{set: {data}, split: {name}}}" for name in trained)}]
  test: [{{set: {data}, split: test}}]
  skip_invalid: true       # some public rows are empty or say nothing"""
    if data == "world":
        return "  sources: [{world: 2000}] # of the built-in world; for your own rows: {path: rows.jsonl}"
    held_out = "# without it a tenth of the prompts is held out"
    if Path(data).exists():
        return f"""\
  sources: [{{path: {_quoted(data)}}}]   # from the folder where infalign runs
  # test: [{{path: FILE}}]   {held_out}"""
    return f"""\
  sources: [{{hub: {{id: {data}, split: train}}}}]
  # test: [{{hub: {{id: ID, split: test}}}}]   {held_out}"""


def _has_template(policy: str) -> bool:
    """Return whether a model has a chat template, as far as can be seen without loading it."""
    folder = Path(policy)
    if not folder.is_dir():
        if not is_gguf(policy) and not (is_hub_id(policy) and not policy.startswith(".")):
            raise ConfigError(f"--policy takes scratch, a folder, a GGUF or a hub id; there is no folder {policy}")
        return True
    settings = folder / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    return TEMPLATE.search(text) is not None or (folder / "chat_template.jinja").is_file()


def _source(reward: str, scratch: bool, path: Path) -> str:
    """Return the lines of a reward source."""
    if reward in LEARNED:
        return LEARNED[reward].replace("RATE", "5.0e-4" if scratch else "1.0e-5")
    if reward.startswith(("http://", "https://")):
        return f"  url: {_quoted(reward)}"
    if ":" in reward and not Path(reward).exists() and not is_gguf(reward):
        function_reward(reward)
        if is_file(reward):
            file, _, name = reward.rpartition(":")
            reward = f"{os.path.relpath(Path(file).resolve(), path.parent.resolve())}:{name}"
        return f"  function: {_quoted(reward)}   # score(prompts, responses) -> one number each"
    if not Path(reward).is_dir() and not is_hub_id(reward):
        raise ConfigError(
            "--reward takes fit, head, my_file.py:function, package.module:function, a URL, a folder or a hub id, "
            f"found {reward}"
        )
    return f"  model: {_quoted(reward)}   # a classifier with one output, used as it is"


def _quoted(text: str) -> str:
    """Return text as YAML, in quotes where it needs some."""
    return write_yaml(text).removesuffix("\n")
