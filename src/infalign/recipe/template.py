"""A first recipe from five answers: data, policy, reward, procedure and KL budget; commented, and checked."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from shlex import quote
from textwrap import indent

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
LEARNT = ("fit", "head")  # rewards that the pairs teach


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
    scratch = answers.policy == "scratch"
    has_pairs = _has_pairs(answers.data)
    template = scratch or _has_template(answers.policy)
    learnt = ("head" if template and not scratch else "fit") if has_pairs else None
    given = answers.reward or learnt
    if given is None:
        raise ConfigError(f"{answers.data} has no preference pairs, which a reward learns from; give --reward")
    if given in LEARNT and not has_pairs:
        raise ConfigError(f"{answers.data} has no preference pairs, which a reward of --reward {given} learns from")
    procedure, budget, k = read_procedure(answers.procedure), answers.kl_budget, ROLLOUTS[scratch]
    most = procedure.n if is_extreme(procedure) else 1
    samples = rewind_samples(procedure) if rewinds(procedure) else 2 * most
    transform = _best_transform(answers.procedure, budget, k)
    reward_trunk = given == "fit"
    ordinary = [
        "  ordinary:                # ordinary RLHF, to compare with",
        "    transform: identity",
        f"    kl_budget: {budget}",
        *_training(scratch, reward_trunk),
    ]
    student = "4.0e-4" if scratch else "2.0e-4, device_batch_size: 8, lora: {rank: 16}"
    parts = [
        f"# {answers.data}, served as {answers.procedure}: written by `infalign init`.",
        "# Every key, with its meaning: infalign recipes --explain KEY, such as policies.NAME.kl_budget.",
        f"run_dir: {_quoted(f'runs/{path.stem}')}",
        f"procedure: {answers.procedure}   # how the policy will be served",
        "",
        *_data(answers.data),
        "",
        *_policy(answers.policy, template),
        "",
        "reward:                    # ranks responses, in training and when the policy is served",
        *_source(given, scratch, path),
        "",
        *_judge(learnt, scratch),
        "",
        f"rollout: {{prompts: 256, k: {k}, max_new_tokens: {48 if scratch else 128}}}   # K responses a prompt",
        "",
        "policies:",
        "  aware:                   # trained for the way it is served",
        f"    transform: {transform}",
        f"    kl_budget: {budget}         # nats a response; more wins more, and moves further away",
        *_training(scratch, reward_trunk),
        *([] if transform == "identity" else ordinary),
        "  # student:               # aware as one plain model, which any server loads",
        f"  #   {{solver: distil, teacher: aware, fit: {{epochs: 1, batch_size: 64, learning_rate: {student}}}}}",
        "",
        f"evaluate: {{prompts: 96, samples: {max(64, samples)}, max_n: {max(16, most)}}}",
        "compute: {device: cpu, processes: 2, threads: 1}" if scratch else "compute: {device: auto}",
    ]
    return "\n".join(parts) + "\n"


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


def _data(data: str) -> Iterator[str]:
    yield "data:"
    if data in SETS:
        yield "  folder: data             # where `infalign data get` puts it"
        trained = [name for name in SETS[data].parts if name in ("train", "demonstrations")]
        yield f"  sources: [{', '.join(f'{{set: {data}, split: {name}}}' for name in trained)}]"
        yield f"  test: [{{set: {data}, split: test}}]"
        yield "  skip_invalid: true       # some public rows are empty or say nothing"
    elif data == "world":
        yield "  sources: [{world: 2000}] # of the built-in world; for your own rows: {path: rows.jsonl}"
    elif Path(data).exists():
        yield f"  sources: [{{path: {_quoted(data)}}}]   # from the folder where infalign runs"
        yield "  # test: [{path: FILE}]   # without it a tenth of the prompts is held out"
    else:
        yield f"  sources: [{{hub: {data}, split: train}}]"
        yield "  # test: [{hub: ID, split: test}]   # without it a tenth of the prompts is held out"
    yield f"  max_prompt_tokens: {48 if data == 'world' else 256}   # longer prompts are left out and counted"


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


def _policy(policy: str, template: bool) -> Iterator[str]:
    yield "policy:                    # with `fit` it is first tuned on demonstrations, or on the chosen responses"
    if policy == "scratch":
        yield "  scratch: {vocabulary: 2048, hidden: 128, layers: 3, heads: 4, context: 512}"
        yield "  fit: {epochs: 2, batch_size: 8, learning_rate: 2.0e-3, max_length: 256}"
        return
    yield f"  model: {_quoted(policy)}"
    sft = "fit: {epochs: 1, batch_size: 16, device_batch_size: 4, learning_rate: 1.0e-4, lora: {rank: 16}}"
    if template:
        yield f"  # {sft}"
    else:
        yield "  chat_template: plain     # the model has none; a Jinja file is taken too"
        yield f"  {sft}"


def _source(reward: str, scratch: bool, path: Path) -> list[str]:
    """Return the lines of a reward source."""
    if reward == "fit":
        rate = "5.0e-4" if scratch else "1.0e-5"
        return [
            "  # a Bradley–Terry model of the pairs, starting from the policy",
            f"  fit: {{epochs: 1, batch_size: 16, learning_rate: {rate}, max_length: 512}}",
        ]
    if reward == "head":
        return ["  head: {pairs: 4000}      # Bradley–Terry on states of the frozen policy: no rate to choose"]
    if reward.startswith(("http://", "https://")):
        return [f"  url: {_quoted(reward)}"]
    if ":" in reward and not Path(reward).exists() and not is_gguf(reward):
        function_reward(reward)
        if is_file(reward):
            file, _, name = reward.rpartition(":")
            reward = f"{os.path.relpath(Path(file).resolve(), path.parent.resolve())}:{name}"
        return [f"  function: {_quoted(reward)}   # score(prompts, responses) -> one number each"]
    if not Path(reward).is_dir() and not is_hub_id(reward):
        raise ConfigError(
            "--reward takes fit, head, my_file.py:function, package.module:function, a URL, a folder or a hub id, "
            f"found {reward}"
        )
    return [f"  model: {_quoted(reward)}   # a classifier with one output, used as it is"]


def _judge(learnt: str | None, scratch: bool) -> list[str]:
    if learnt is None:
        return [
            "# judge: {function: my_judge.py:score}   # evaluates what the reward has not seen; as a reward is given"
        ]
    return ["judge:                     # only evaluates; learns from other pairs", *_source(learnt, scratch, Path())]


def _training(scratch: bool, reward_trunk: bool) -> list[str]:
    """Return the lines of a policy that say how it is trained: a guide beside the frozen reference."""
    if scratch:
        trunk = "reward" if reward_trunk else "reference"
        how = ["guide: {trunk: " + trunk + "}", "fit: {epochs: 1, batch_size: 128, learning_rate: 1.0e-3}"]
    else:
        how = [
            "guide: {lora: {rank: 16}}",
            "fit: {epochs: 1, batch_size: 64, device_batch_size: 8, learning_rate: 2.0e-4}   # 1e-3 spoils such models",
        ]
    return indent("\n".join(how), "    ").splitlines()


def _quoted(text: str) -> str:
    """Return text as YAML, in quotes where it needs some."""
    return write_yaml(text).removesuffix("\n")
