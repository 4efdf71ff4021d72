"""The work of each stage: read tables and models of the run directory, write tables and models.

Every function takes the recipe and the run's root, reports progress through ``report(done, total, note)`` and returns a
JSON-able summary. When to run it, and whether its result still holds, is `infalign.pipeline`'s business.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import expit

from infalign.calibration import Array, calibrate, win
from infalign.config import ON_POLICY, OWN_TRANSFORM, Fit, Model, Policy, Recipe, RewardSource, Source
from infalign.data import (
    MESSAGES,
    Example,
    Message,
    fsync,
    hash_file,
    load_examples,
    read_record,
    read_rows,
    read_table,
    split_by_group,
    without_groups_of,
    write_table,
    write_text,
    writing,
)
from infalign.errors import ConfigError, DataError
from infalign.evaluation import estimate
from infalign.finite import finite_rollouts
from infalign.jobs import Report
from infalign.optimum import optimal
from infalign.pretrained import conversation_ids, why_unloadable
from infalign.procedures import BestOfN, RewindAndRepeat, WorstOfN, parse_procedure
from infalign.rollouts import (
    Drawn,
    Lazy,
    Prompt,
    chained,
    find_rollouts,
    in_blocks,
    token_lists,
    token_lists_on_disk,
)
from infalign.shaping import Ranked, budget_beta, parse_shaping
from infalign.theory import Law, Served, aligned_law, law_at_kl

Summary = dict[str, Any]
STAGES = ("data", "sft", "reward-model", "rollout", "score", "calibrate", "train", "evaluate", "report")
FORMAT = 1  # of the records, larger when a version that knows the one before would misread them
PARTS = 4  # of the rollouts, each a unit of work
HELD_OUT_PAIRS = 512
LESSON = 10_000  # characters of a text that a tokenizer learns from: a word costs it the square of its length
BATCH_TOKENS = 16384  # tokens a forward pass
MANIFEST = b"infalign"  # in the schema of calibrated.parquet: what it was made with
MODEL_FILES = {".safetensors", ".json", ".jinja", ".model", ".txt"}  # weights, configuration, tokenizer
MOST_LOST = 0.02  # of a win rate, to ranks among K rollouts, before a run says so
BOND_REGULARISER = 1.0  # γ of J-BOND, the weight of the KL to its moving anchor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in a run directory."""

    root: Path

    @property
    def data(self) -> Path:
        """Tables of demonstrations, preferences and prompts, and the tokenizer."""
        return self.root / "data"

    @property
    def tokenizer(self) -> Path:
        """The policy's tokenizer."""
        return self.data / "tokenizer"

    def model(self, name: str) -> Path:
        """Return the folder of a trained model: reference, reward, judge or a policy."""
        return self.root / "models" / name

    def checkpoints(self, name: str) -> Path:
        """Return the folder of a training that is under way."""
        return self.root / "checkpoints" / name

    def rollouts(self, part: int) -> Path:
        """Return the folder of a part of the K rollouts of every training prompt."""
        return self.root / "rollouts" / f"part-{part}"

    def scores(self, part: int) -> Path:
        """Return the table of rewards of a part of the rollouts; the folder of that name has them as they came in."""
        return self.root / "scores" / f"part-{part}.parquet"

    def scored(self, name: str) -> list[Path]:
        """Return all shards of rewards by the source ``name``, those of training prompts first."""
        rollouts = sorted(self.root.glob("scores/part-*/part-[0-9]*.parquet")) if name == "reward" else []
        return rollouts + sorted(self.root.glob(f"evaluation*/*/scores/{name}/part-[0-9]*.parquet"))

    @property
    def calibrated(self) -> Path:
        """Training prompts with the column ``reference_rewards``."""
        return self.root / "calibrated.parquet"

    def evaluation(self, name: str, split: str = "test") -> Path:
        """Return the folder of a model's samples, scores and KL on the prompts of a split."""
        return self.root / ("evaluation" if split == "test" else f"evaluation-{split}") / name

    @property
    def results(self) -> Path:
        """All numbers of the evaluation."""
        return self.root / "results.json"


def records(root: Path) -> dict[str, dict[str, Any]]:
    """Return the records of the finished units, in the order of the stages: key, stage, seconds, summary, versions.

    Raises DataError for one that is damaged, and ConfigError for one of a newer version.
    """
    found = {path.stem: read_record(path) for path in sorted((root / "stages").glob("*.json"))}
    for name, record in found.items():
        if record.get("format", FORMAT) > FORMAT:
            raise ConfigError(
                f"{root} was made by infalign {record['versions']['infalign']}, whose records this version does not "
                f"know (stages/{name}.json has format {record['format']}, the newest known is {FORMAT}); install that "
                "version, or choose another run_dir"
            )
    return dict(sorted(found.items(), key=lambda item: STAGES.index(item[1]["stage"])))


# Data


def prepare_data(recipe: Recipe, root: Path, *, report: Report) -> Summary:
    """Read the sources, split them without leaks, make the tokenizer and write the tables that training reads.

    A row that is there twice counts twice, and ``repeated`` says how many such there are; a prompt has rollouts once.
    Prompts over ``max_prompt_tokens`` are left out and counted. Nothing is written before all is read and checked.
    """
    examples, skipped = read_examples(recipe, recipe.data.sources)
    if recipe.data.test:
        test, skipped_test = read_examples(recipe, recipe.data.test)
        skipped += skipped_test
        train, overlapping = without_groups_of(examples, test)
    else:
        fraction = recipe.data.test_fraction
        parts = split_by_group(examples, {"test": fraction, "train": 1 - fraction}, seed=recipe.seed)
        train, test, overlapping = parts["train"], parts["test"], 0
    fraction = recipe.data.judge_fraction if recipe.judge.fit is not None else 0.0  # a ready judge needs no rows
    parts = split_by_group(train, {"judge": fraction, "reward": 1 - fraction}, seed=recipe.seed + 1)

    tokenizer = _tokenizer(recipe, train)
    prompts = {
        "train": _distinct_prompts(parts["reward"], tokenizer, recipe.data.max_prompt_tokens),
        "test": _distinct_prompts(test, tokenizer, recipe.data.max_prompt_tokens),
    }
    for name, (short, _) in prompts.items():
        if len(short) < PARTS:
            raise DataError(
                f"{len(short)} {name} prompts of at most {recipe.data.max_prompt_tokens} tokens are left, and a run "
                f"takes {PARTS} or more; use more data or raise data.max_prompt_tokens"
            )
    demonstrations = [e for e in train if e.rejected is None] or train
    pairs = {
        "reward_pairs": [e for e in parts["reward"] if e.rejected is not None],
        "judge_pairs": [e for e in parts["judge"] if e.rejected is not None],
        # One of each conversation start, so that pairs are independent, in an order that depends on their text alone.
        "test_pairs": list({e.group: e for e in sorted(test, key=_place) if e.rejected is not None}.values()),
    }
    pairs["test_pairs"] = pairs["test_pairs"][:HELD_OUT_PAIRS]

    layout = Layout(root)
    (root / "stages" / "data.json").unlink(missing_ok=True)  # from here on what it records is replaced
    shutil.rmtree(layout.data, ignore_errors=True)
    layout.data.mkdir()
    with writing(layout.tokenizer):
        tokenizer.save_pretrained(layout.tokenizer)
    for name, (short, _) in prompts.items():
        _write_prompts(layout.data / f"{name}_prompts.parquet", short)
    for name, rows in {"demonstrations": demonstrations, **pairs}.items():
        _write_examples(layout.data / f"{name}.parquet", rows)
    write_text(layout.data / "skipped.txt", "".join(f"{message}\n" for message in skipped))
    return {
        "examples": len(examples),
        "skipped": len(skipped),
        "repeated": len(examples) - len({(e.prompt_id, e.chosen, e.rejected) for e in examples}),
        "dropped_shared_start": overlapping,
        "demonstrations": len(demonstrations),
        **{name: len(rows) for name, rows in pairs.items()},
        **{f"{name}_prompts": len(short) for name, (short, _) in prompts.items()},
        **{f"{name}_prompts_too_long": long for name, (_, long) in prompts.items()},
    }


def _place(example: Example) -> str:
    return example.group + example.prompt_id


def read_examples(recipe: Recipe, sources: Sequence[Source]) -> tuple[list[Example], list[str]]:
    """Return the examples of all sources, and why each invalid row was left out if the recipe allows that."""
    examples, skipped = [], []
    for source in sources:
        if source.world is not None:
            read, messages = _world_examples(source.world, recipe.seed), list[str]()
        else:
            rows = islice(_rows(source, recipe.data.folder), source.limit)
            read, messages = load_examples(rows, skip_invalid=recipe.data.skip_invalid)
        examples += read
        skipped += messages
    return examples, skipped


def _rows(source: Source, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.hub is not None:
        from infalign.hub import hub_rows

        return hub_rows(source.hub, split=source.split, data_dir=source.data_dir)
    return read_rows(Path(folder) / str(source.path))


def _world_examples(n: int, seed: int) -> list[Example]:
    from infalign import world

    demonstrations = [
        Example(({"role": "user", "content": d.request},), d.reply, None, f"world dialogue {i}")
        for i, d in enumerate(world.dialogues(n, seed=seed))
    ]
    return demonstrations + [
        Example(({"role": "user", "content": request},), chosen, rejected, f"world pair {i}")
        for i, (request, chosen, rejected) in enumerate(world.preferences(n, seed=seed, temperature=1.0))
    ]


def _tokenizer(recipe: Recipe, train: list[Example]) -> Any:
    """Make (from scratch) or load the policy's tokenizer."""
    if recipe.policy.scratch is not None:
        from infalign.training.scratch import train_tokenizer

        texts = (text for e in train for text in (*(turn["content"] for turn in e.prompt), e.chosen, e.rejected or ""))
        return train_tokenizer((text[:LESSON] for text in texts), recipe.policy.scratch)
    return load_tokenizer(str(recipe.policy.model))


def load_tokenizer(path: str | Path, **options: Any) -> Any:
    """Load a tokenizer; without a padding token it pads with EOS.

    Raises ConfigError if there is none, or it has no EOS token or no chat template that renders.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for a folder that it cannot read
        raise ConfigError(f"{path} has no tokenizer that can be loaded: {why_unloadable(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path} has no EOS token, so responses would never end; set its eos_token")
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {path} has no chat template; choose a model with one")
    try:
        conversation_ids(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except DataError as error:
        raise ConfigError(f"the chat template of {path} cannot render one user turn: {error.__cause__}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _distinct_prompts(
    examples: list[Example], tokenizer: Any, max_tokens: int
) -> tuple[list[tuple[str, list[Message], list[int]]], int]:
    """Return distinct prompts that fit, in an order that depends on their text alone, and how many were too long."""
    prompts = {e.prompt_id: [dict(turn) for turn in e.prompt] for e in examples}
    rows, too_long = [], 0
    for identity in sorted(prompts):
        token_ids = conversation_ids(tokenizer, prompts[identity], add_generation_prompt=True)
        if len(token_ids) > max_tokens:
            too_long += 1
        else:
            rows.append((identity, prompts[identity], token_ids))
    return rows, too_long


def _write_prompts(path: Path, rows: list[tuple[str, list[Message], list[int]]]) -> None:
    identities, prompts, ids = zip(*rows, strict=True)
    write_table(
        path,
        pa.table(
            {
                "prompt_id": pa.array(identities, pa.string()),
                "prompt": pa.array(prompts, MESSAGES),
                "token_ids": pa.array(ids, pa.list_(pa.int32())),
            }
        ),
    )


def _write_examples(path: Path, examples: list[Example]) -> None:
    write_table(
        path,
        pa.table(
            {
                "prompt": pa.array([list(e.prompt) for e in examples], MESSAGES),
                "chosen": pa.array([e.chosen for e in examples], pa.string()),
                "rejected": pa.array([e.rejected for e in examples], pa.string()),
                "where": pa.array([e.where for e in examples], pa.string()),
            }
        ),
    )


# Models


def model_path(model: Model, name: str, root: Path) -> str:
    """Return the folder or hub id of a model: what the run trained, or the ready model that the recipe names."""
    return str(Layout(root).model(name)) if model.fit is not None else str(model.model)


def fine_tune_policy(recipe: Recipe, root: Path, *, report: Report) -> Summary:
    """Supervised fine-tuning: the result is the reference policy."""
    from infalign.rollouts import load_policy
    from infalign.training.scratch import new_policy
    from infalign.training.supervised import fine_tune

    assert recipe.policy.fit is not None
    layout, fit = Layout(root), recipe.policy.fit
    tokenizer = load_tokenizer(layout.tokenizer)
    if recipe.policy.scratch is not None:
        model = new_policy(recipe.policy.scratch, tokenizer, seed=recipe.seed)
    else:
        model, _ = load_policy(str(recipe.policy.model), device=device(recipe))
    table = read_table(layout.data / "demonstrations.parquet").to_pylist()
    rows, long = fitting(table, tokenizer, fit, lambda row: [row["chosen"]])
    if not rows:
        raise DataError(f"all {long} demonstrations exceed {fit.max_length} tokens; raise policy.fit.max_length")
    with training_to(recipe, layout, "reference", report) as (job, folder):
        history = fine_tune(
            model,
            tokenizer,
            [(row["prompt"], row["chosen"]) for row in rows],
            fit,
            job,
            folder,
        )
    return {"rows": len(rows), "rows_too_long": long, "history": history, "loss": _last(history, "loss")}


def fit_reward(recipe: Recipe, root: Path, name: str, *, report: Report) -> Summary:
    """Fit the reward model or the judge (``name``) on its own share of the preference pairs."""
    from infalign.scoring import ClassifierReward, score
    from infalign.training.common import save_model
    from infalign.training.scratch import new_policy
    from infalign.training.supervised import fit_reward_model

    layout, source = Layout(root), reward_source(recipe, name)
    assert source.fit is not None
    tokenizer = load_tokenizer(source.model or layout.tokenizer)
    if source.scratch is not None:
        start = str(layout.checkpoints(name) / "start")
        save_model(new_policy(source.scratch, tokenizer, seed=recipe.seed + 1), tokenizer, Path(start))
    else:
        start = source.model or model_path(recipe.policy, "reference", root)
    train, long = _pairs(layout, "reward" if name == "reward" else "judge", tokenizer, source.fit)
    test, _ = _pairs(layout, "test", tokenizer, source.fit)
    with training_to(recipe, layout, name, report) as (job, folder):
        history = fit_reward_model(start, tokenizer, train, test, source.fit, job, folder)
    # Once more and pair by pair: TRL's eval_accuracy is a mean over batches, also where the last one is a single pair.
    prompts, chosen, rejected = map(list, zip(*test, strict=True))
    reward = ClassifierReward.load(str(layout.model(name)), device=device(recipe))
    right = win(score(reward, prompts, chosen, name=name), score(reward, prompts, rejected, name=name))
    return {
        "pairs": len(train),
        "pairs_too_long": long,
        "history": history,
        "test_accuracy": estimate(right, confidence=recipe.evaluate.confidence, seed=recipe.seed).as_dict(),
    }


def _pairs(layout: Layout, part: str, tokenizer: Any, fit: Fit) -> tuple[list[tuple[list[Message], str, str]], int]:
    """Return (prompt, chosen, rejected) of the pairs that fit, and how many were too long."""
    table = read_table(layout.data / f"{part}_pairs.parquet").to_pylist()
    rows, long = fitting(table, tokenizer, fit, lambda row: [row["chosen"], row["rejected"]])
    if not rows:
        raise DataError(
            f"a reward model learns from pairs, and none of the {len(table)} {part} pairs has at most "
            f"{fit.max_length} tokens; use more data or raise fit.max_length"
        )
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in rows], long


def reward_source(recipe: Recipe, name: str) -> RewardSource:
    """Return the recipe's reward source ``reward``, ``judge`` or ``gold``."""
    source = {"reward": recipe.reward, "judge": recipe.judge, "gold": recipe.gold}[name]
    assert source is not None
    return source


def reward_names(recipe: Recipe) -> list[str]:
    """Return the names of the reward sources that evaluation uses."""
    return ["reward", "judge", *(["gold"] if recipe.gold is not None else [])]


def load_reward(recipe: Recipe, root: Path, name: str) -> Any:
    """Return the reward function ``name``: text in, numbers out, a batch at a time.

    Raises DataError if a server or a function does not give the rewards any more that the run has of it already.
    """
    from infalign.scoring import ClassifierReward, RemoteReward, check_unchanged, function_reward

    source, layout = reward_source(recipe, name), Layout(root)
    if source.is_classifier:
        return ClassifierReward.load(model_path(source, name, root), device=device(recipe))
    if source.function is not None:
        reward: Any = function_reward(source.function)
    else:
        reward = RemoteReward(str(source.url), load_tokenizer(layout.tokenizer), api_key_env=source.api_key_env)
    check_unchanged(reward, layout.scored(name), name=name, made_by=score_maker(recipe, root, name))
    return reward


def score_maker(recipe: Recipe, root: Path, name: str) -> str:
    """Return what scores are kept under: `reward_identity`, with the source of a function, which may be changed."""
    identity, function = reward_identity(recipe, root, name), reward_source(recipe, name).function
    if function is None:
        return identity
    file = importlib.import_module(function.partition(":")[0]).__file__
    return f"{identity} (source {hash_file(Path(file))[:8]})" if file else identity


def reward_identity(recipe: Recipe, root: Path, name: str) -> str:
    """Return what tells a reward from others: its url, its function's name or the digest of its model."""
    source = reward_source(recipe, name)
    return source.url or source.function or model_digest(model_path(source, name, root))


# Rollouts, scores, calibration


def parts(recipe: Recipe) -> int:
    """Return in how many parts rollouts are drawn and scored, whatever the number of processes."""
    return 1 if recipe.rollout.engine.kind == "server" else PARTS  # a server serves all prompts at once


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order of their table: identity, conversation, tokens; the last two are made when asked for."""

    prompt_ids: list[str]
    conversations: Sequence[list[Message]]
    token_ids: Sequence[list[int]]

    @classmethod
    def read(cls, path: Path, first: int, every: slice = slice(None)) -> "Prompts":
        """Return ``every`` of the ``first`` prompts of a table."""
        table = read_table(path)
        table = table.take(np.arange(min(first, table.num_rows))[every])

        conversations = in_blocks(table.num_rows, 64, lambda start: listed(table.slice(start, 64), "prompt"))
        return cls(listed(table, "prompt_id"), conversations, token_lists(table["token_ids"]))


def train_prompts(recipe: Recipe, root: Path, part: int) -> Prompts:
    """Return one part of the training prompts."""
    every = slice(part, None, parts(recipe))
    return Prompts.read(Layout(root).data / "train_prompts.parquet", recipe.rollout.prompts, every)


def draw_rollouts(recipe: Recipe, root: Path, part: int, *, report: Report) -> Summary:
    """Draw K responses from the reference policy for one part of the training prompts."""
    prompts, model = train_prompts(recipe, root, part), model_path(recipe.policy, "reference", root)
    _draw(recipe, model, prompts, recipe.rollout.k, Layout(root).rollouts(part), recipe.seed, report)
    return {"responses": len(prompts.prompt_ids) * recipe.rollout.k}


def _draw(recipe: Recipe, model: str, prompts: Prompts, k: int, folder: Path, seed: int, report: Report) -> None:
    """Draw ``k`` responses to each prompt from ``model`` into ``folder``."""
    from infalign.rollouts import Sampling, draw

    rows = Lazy(len(prompts.prompt_ids), lambda i: Prompt(prompts.prompt_ids[i], prompts.token_ids[i]))
    with open_engine(recipe, model, Sampling(recipe.rollout.max_new_tokens, seed=seed), rows[0]) as engine:
        draw(engine, rows, k, folder, on_progress=lambda done, total: report(done, total, "responses"))


def rollouts_so_far(recipe: Recipe, root: Path, part: int) -> str:
    """Return how many rollouts of one part of the training prompts are there: ``30 of 72 responses``, "" for none."""
    return _so_far(train_prompts(recipe, root, part), recipe.rollout.k, Layout(root).rollouts(part))


def scores_so_far(folder: Path) -> str:
    """Return how many distinct responses the shards of a folder have rewards of, "" for none."""
    scored = sum(read_table(shard, ["reward"]).num_rows for shard in folder.glob("part-*.parquet"))
    return f"{scored:,} responses scored" if scored else ""


def _so_far(prompts: Prompts, k: int, folder: Path) -> str:
    wanted, drawn = set(prompts.prompt_ids), 0
    for shard in folder.glob("part-*.parquet"):
        table = read_table(shard, ["prompt_id", "index"])
        rows = zip(listed(table, "prompt_id"), listed(table, "index"), strict=True)
        drawn += sum(prompt_id in wanted and index < k for prompt_id, index in rows)
    return f"{drawn:,} of {len(wanted) * k:,} responses" if drawn else ""


def score_rollouts(recipe: Recipe, root: Path, part: int, *, report: Report) -> Summary:
    """Score one part of the rollouts with the reward."""
    layout, prompts, k = Layout(root), train_prompts(recipe, root, part), recipe.rollout.k
    rollouts = find_rollouts(layout.rollouts(part), prompts.prompt_ids, k)
    folder = layout.scores(part).with_suffix("")
    rewards = _score(recipe, root, "reward", prompts, rollouts, folder, report)
    write_table(layout.scores(part), _numbered(prompts.prompt_ids, k).append_column("reward", pa.array(rewards)))
    return {"responses": len(rollouts), "cut_off": _cut_off(rollouts)}


def _score(
    recipe: Recipe, root: Path, name: str, prompts: Prompts, rollouts: Drawn, folder: Path, report: Report
) -> Array:
    """Return the rewards of rollouts by the source ``name``, continuing with those that are in ``folder``."""
    from infalign.scoring import score_to

    k = len(rollouts) // len(prompts.prompt_ids)
    return score_to(
        folder,
        load_reward(recipe, root, name),
        Lazy(len(rollouts), lambda i: prompts.conversations[i // k]),
        rollouts.values("text"),
        name=name,
        made_by=score_maker(recipe, root, name),
        on_progress=lambda done, total: report(done, total, f"scores by {name}"),
    )


def _numbered(prompt_ids: list[str], k: int) -> pa.Table:
    """Return the columns prompt_id and index of ``k`` responses to each prompt."""
    repeated_ids = pa.array(prompt_ids, pa.string()).take(
        pa.array(np.repeat(np.arange(len(prompt_ids)), k), pa.int64())
    )
    return pa.table({"prompt_id": repeated_ids, "index": np.tile(np.arange(k, dtype=np.int32), len(prompt_ids))})


def calibrate_prompts(recipe: Recipe, root: Path, *, report: Report) -> Summary:
    """Give every training prompt the column ``reference_rewards``: its K rewards, sorted.

    The schema of the table carries a manifest, as JSON: `made_with`, K and the number of prompts.
    """
    layout, k, every = Layout(root), recipe.rollout.k, parts(recipe)
    table = read_table(layout.data / "train_prompts.parquet").slice(0, recipe.rollout.prompts)
    rewards_PK = np.empty((table.num_rows, k))
    distinct, spread = np.empty((2, table.num_rows))
    for part in range(every):
        part_PK = np.sort(read_table(layout.scores(part), ["reward"])["reward"].to_numpy().reshape(-1, k), axis=1)
        rewards_PK[part::every], spread[part::every] = part_PK, part_PK.std(axis=1)
        distinct[part::every] = 1 + (part_PK[:, 1:] != part_PK[:, :-1]).sum(axis=1)
    ends = pa.array(np.arange(len(rewards_PK) + 1) * k, pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.array(rewards_PK.ravel(), pa.float64()))
    table = table.append_column("reference_rewards", lists)
    manifest = json.dumps(made_with(recipe, root) | {"k": k, "prompts": len(rewards_PK)})
    write_table(layout.calibrated, table.replace_schema_metadata({MANIFEST: manifest}))
    return {
        "prompts": len(rewards_PK),
        "k": k,
        "tied": float(1 - distinct.mean() / k),
        "degenerate_prompts": int((distinct == 1).sum()),
        "reward_spread_between_prompts": float(spread.max() / max(spread.min(), 1e-12)),
    }


def reference_rewards(root: Path) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(Layout(root).calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def made_with(recipe: Recipe, root: Path) -> dict[str, str]:
    """Return what calibrated rewards depend on: the digest of ``reference`` and the identity of ``reward``."""
    reference = model_digest(model_path(recipe.policy, "reference", root))
    return {"reference": reference, "reward": reward_identity(recipe, root, "reward")}


def model_digest(model: str, of_file: Callable[[Path], str] = hash_file) -> str:
    """Return the hash of what a model folder's weights, configuration and tokenizer hold; a hub id is its own.

    ``of_file`` returns the hash of one file, `hash_file`'s or one that is known.
    """
    if not Path(model).is_dir():
        return model
    digest = blake2b(digest_size=16)
    for path in sorted(Path(model).iterdir()):
        if path.suffix in MODEL_FILES:
            digest.update(path.name.encode() + bytes.fromhex(of_file(path)))
    return digest.hexdigest()


def check_calibrated(recipe: Recipe, root: Path) -> None:
    """Raise DataError unless the calibrated rewards are those of the recipe's reward and reference policy as they are.

    The pipeline knows what the recipe says; this is about models that were exchanged under the same name.
    """
    path = Layout(root).calibrated
    table = read_table(path)
    manifest = (table.schema.metadata or {}).get(MANIFEST)
    if manifest is None or "reference_rewards" not in table.column_names:
        raise DataError(
            f"{path} has {'no manifest' if manifest is None else 'no column reference_rewards'}; remove it and run "
            "`infalign calibrate` again"
        )
    made, now = json.loads(manifest), made_with(recipe, root)
    for name, stale in (("reference", "rollouts"), ("reward", "scores")):
        if made[name] != now[name]:
            raise DataError(
                f"{path} was made with another {name} model than the one that the recipe gives now; remove the folder "
                f"{root / stale} and run `infalign calibrate` again"
            )


# The rank model


def fit_rank_model(recipe: Recipe, root: Path, *, report: Report) -> Summary:
    """Train a classifier to predict Ĉ of the rollouts; return its `_rank_quality` on a tenth of the prompts, held out.

    Raises DataError where `check_calibrated` does, if no rollout fits, or if fewer than two held-out prompts have
    rollouts of different rewards.
    """
    from infalign.training.calibrated import fit_calibrated

    assert recipe.rank_model is not None
    check_calibrated(recipe, root)
    fit, k, start = recipe.rank_model.fit, recipe.rollout.k, rank_model_start(recipe, root)
    tokenizer = load_tokenizer(start)
    rows = _ranked_rollouts(recipe, root)
    every = min(10, len(rows) // k // 2)  # so that two or more are held out
    train, held_out = ([row for i, row in enumerate(rows) if (i // k % every == 0) == out] for out in (False, True))
    ordered = sum(len({row["rank"] for row in held_out[i : i + k]}) > 1 for i in range(0, len(held_out), k))
    if ordered < 2:
        raise DataError(
            f"{ordered} of the {len(held_out) // k} prompts held out from the rank model have rollouts of different "
            "rewards, and an interval needs 2; raise rollout.prompts or rollout.k"
        )
    short, long = fitting(train, tokenizer, fit, lambda row: [row["response"]])
    if not short:
        raise DataError(f"all {long} rollouts exceed {fit.max_length} tokens; raise rank_model.fit.max_length")
    with training_to(recipe, Layout(root), "rank", report) as (job, folder):
        fit_calibrated(
            start, tokenizer, [(row["prompt"], row["response"], row["rank"]) for row in short], fit, job, folder
        )
    quality = _rank_quality(recipe, root, held_out)
    return {"rollouts": len(short), "rollouts_too_long": long, **quality, "held_out_prompts": len(held_out) // k}


def rank_model_start(recipe: Recipe, root: Path) -> str:
    """Return where the rank model starts: its own `model`, else the reward model, else the reference policy."""
    assert recipe.rank_model is not None
    if recipe.rank_model.model is not None:
        return recipe.rank_model.model
    if recipe.reward.is_classifier:
        return model_path(recipe.reward, "reward", root)
    return model_path(recipe.policy, "reference", root)


def _ranked_rollouts(recipe: Recipe, root: Path) -> list[dict[str, Any]]:
    """Return prompt, response and rank of all rollouts, prompt by prompt; the rank is among the prompt's own K."""
    layout, k = Layout(root), recipe.rollout.k
    rows: list[dict[str, Any]] = []
    for part in range(parts(recipe)):
        prompts = train_prompts(recipe, root, part)
        rewards_PK = read_table(layout.scores(part))["reward"].to_numpy().reshape(-1, k)
        columns = {
            "prompt": repeated(prompts.conversations, k),
            "response": find_rollouts(layout.rollouts(part), prompts.prompt_ids, k).values("text"),
            "rank": calibrate(rewards_PK, np.sort(rewards_PK, axis=1)).ravel().tolist(),
        }
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


def _rank_quality(recipe: Recipe, root: Path, rows: list[dict[str, Any]]) -> Summary:
    """Return how well the rank model predicts the ranks of ``rows``, K of each prompt: means over prompts.

    Of u = sigmoid(output), ``squared_error`` is that of (u − Ĉ)² and ``rank_correlation`` that of Spearman's, over
    prompts whose rollouts do not all tie. A constant 1/2 has ``squared_error_of_half`` and a correlation of 0.
    """
    from infalign.scoring import ClassifierReward, score

    model = ClassifierReward.load(Layout(root).model("rank"), device=device(recipe))
    outputs = score(model, [row["prompt"] for row in rows], [row["response"] for row in rows], name="rank")
    predicted_PK = expit(outputs).reshape(-1, recipe.rollout.k)
    ranks_PK = np.reshape([row["rank"] for row in rows], predicted_PK.shape)
    ordered = np.ptp(ranks_PK, axis=1) > 0
    found = {
        "squared_error": ((predicted_PK - ranks_PK) ** 2).mean(axis=1),
        "squared_error_of_half": ((0.5 - ranks_PK) ** 2).mean(axis=1),
        "rank_correlation": rank_correlations(predicted_PK[ordered], ranks_PK[ordered]),
    }
    mean = partial(estimate, confidence=recipe.evaluate.confidence, seed=recipe.seed)
    return {name: mean(values_P).as_dict() for name, values_P in found.items()}


def rank_correlations(predicted_PK: Array, ranks_PK: Array) -> Array:
    """Return Spearman's correlation within each prompt, shape (P,); 0 where its predictions all tie.

    Ties have mid-ranks. ``ranks_PK`` are calibrated rewards, so mid-ranks already; those of a prompt must not all tie.
    """
    found_PK = calibrate(predicted_PK, np.sort(predicted_PK, axis=1)) - 0.5
    true_PK = ranks_PK - 0.5  # the mean of mid-ranks
    together_P = np.sqrt((found_PK**2).sum(axis=1) * (true_PK**2).sum(axis=1))
    products_P = (found_PK * true_PK).sum(axis=1)
    return np.asarray(np.divide(products_P, together_P, out=np.zeros_like(products_P), where=together_P > 0))


# Training


def coarse_ranks(recipe: Recipe) -> list[str]:
    """Return a warning for each policy that loses much because its rewards are ranked among K rollouts only.

    That is theory's answer, for a policy with a KL budget that is trained on ranks, under the recipe's procedure; it
    has none under Rewind-and-Repeat.
    """
    procedure, k = parse_procedure(recipe.procedure), recipe.rollout.k
    if isinstance(procedure, RewindAndRepeat):
        return []
    warnings = []
    for name, policy in recipe.policies.items():
        shaping, kl = parse_shaping(policy.transform), policy.kl_budget
        if policy.solver in OWN_TRANSFORM or policy.ranks == "model" or not isinstance(shaping, Ranked) or kl is None:
            continue
        try:
            found = finite_rollouts(shaping.transform, procedure, rollouts=k, kl=kl, seed=recipe.seed)
        except ConfigError as error:  # K rollouts cannot spend so much
            warnings.append(f"policies.{name}: {error}; or raise rollout.k")
            continue
        if found.lost > MOST_LOST:
            warnings.append(
                f"policies.{name}: with {k} rollouts a prompt {policy.transform} wins {100 * found.lost:.1f} ± "
                f"{100 * found.standard_error:.1f} points less of {procedure.name} at {kl:g} nats than with exact "
                "ranks; raise rollout.k"
            )
    return warnings


def train_policy(recipe: Recipe, root: Path, name: str, *, report: Report) -> Summary:
    """Train one policy by its solver, with the β that its KL budget, or its n, asks for.

    Raises DataError for calibrated rewards of another reward or reference policy than the recipe's.
    """
    check_calibrated(recipe, root)
    layout, policy = Layout(root), recipe.policies[name]
    beta, trainer_beta = policy_betas(recipe, root, name)
    reference = model_path(recipe.policy, "reference", root)
    with training_to(recipe, layout, name, report) as (job, folder):
        if policy.solver in ON_POLICY:
            history = _train_online(recipe, root, policy, trainer_beta, job, folder)
        else:
            from infalign.rollouts import load_policy
            from infalign.training.offline import fit_offline, offline_solver

            model, tokenizer = load_policy(reference, device=device(recipe))
            rows = _rewarded_rollouts(recipe, root, policy, model, tokenizer)
            history = fit_offline(model, tokenizer, offline_solver(policy, beta), rows, policy.fit, job, folder)
        if policy.transform.endswith(".json") and not int(os.environ.get("RANK", "0")):
            shutil.copyfile(policy.transform, folder / "transformation.json")  # a policy keeps what it was trained on
    held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
    watched = {"held_out_loss_start": held_out[0], "held_out_loss_best": min(held_out[1:])} if held_out else {}
    watched |= {key: history[-1][key] for key in ("overfitted", "resumed") if key in history[-1]}
    return {"beta": beta, "trainer_beta": trainer_beta, **watched, "history": history}


def _train_online(
    recipe: Recipe, root: Path, policy: Policy, beta: float, job: Any, folder: Path
) -> list[dict[str, Any]]:
    """Train a policy on-policy, with ``beta`` for the normalised values, and return the log.

    With ranks from the rank model the prompts are all training prompts, also those without rollouts.
    """
    from infalign.scoring import ClassifierReward
    from infalign.training.online import Objective, StoredRollouts, fit_online

    layout, procedure = Layout(root), parse_procedure(recipe.procedure)
    predicted = policy.ranks == "model"
    if predicted:
        reward: Any = ClassifierReward.load(layout.model("rank"), device=device(recipe))
        prompts = read_table(layout.data / "train_prompts.parquet", columns=["prompt"])
    else:
        reward = load_reward(recipe, root, "reward")
        prompts = read_table(layout.calibrated, columns=["prompt", "reference_rewards"])
    by_prompt: dict[str, Any] = {}
    if policy.stored:
        rows, k = _stored_rollouts(recipe, root), recipe.rollout.k
        by_prompt = {rows[i]["prompt_id"]: Lazy(k, partial(_after, rows, i)) for i in range(0, len(rows), k)}
    return fit_online(
        model_path(recipe.policy, "reference", root),
        load_tokenizer(layout.tokenizer, padding_side="left"),
        prompts.to_pylist(),
        Objective(
            reward,
            parse_shaping(policy.transform),
            beta,
            predicted=predicted,
            procedure=procedure if isinstance(procedure, (BestOfN, WorstOfN)) else None,
            kl_budget=policy.kl_budget,
        ),
        policy,
        job,
        folder,
        max_new_tokens=recipe.rollout.max_new_tokens,
        stored=StoredRollouts(by_prompt) if policy.stored else None,
    )


def _after(rows: Sequence[dict[str, Any]], first: int, i: int) -> dict[str, Any]:
    return rows[first + i]


def policy_beta(recipe: Recipe, root: Path, name: str) -> float:
    """Return the paper's β of a policy: given, or whose optimum spends the KL budget or is Best-of-n.

    For rewards that are no ranks that depends on their law: β spends the budget on the stored rollouts.
    """
    policy = recipe.policies[name]
    law = policy_law(policy, parse_procedure(recipe.procedure))
    if law is not None:
        return law.beta
    if policy.beta is not None:
        return policy.beta
    if policy.solver == "bond":
        return BOND_REGULARISER
    assert policy.kl_budget is not None
    shaping = parse_shaping(policy.transform)
    references_PK = reference_rewards(root)
    shaped_PK = np.stack([shaping(references_K, references_K) for references_K in references_PK])
    return budget_beta(shaped_PK, policy.kl_budget)


def policy_betas(recipe: Recipe, root: Path, name: str) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalised Φ that it is trained on."""
    beta = policy_beta(recipe, root, name)
    return beta, beta / parse_shaping(recipe.policies[name].transform).scale


def policy_law(policy: Policy, procedure: Served) -> Law | None:
    """Return the law that theory gives for a policy that is free for every prompt; None where there is none.

    There is none for rewards that are no ranks, and for bond, which has no objective but its next step.
    """
    if policy.kl_budget is not None:
        return method_law(policy.solver, policy.transform, procedure, policy.kl_budget)
    shaping = parse_shaping(policy.transform)
    if not isinstance(shaping, Ranked):
        return None
    if policy.solver == "maxk":
        return optimal(procedure, beta=policy.beta).law
    beta = policy.beta if policy.n is None else 1.0 / (policy.n - 1)  # Best-of-n itself
    assert beta is not None
    return aligned_law(shaping.transform, beta=beta)


def method_law(solver: str, transform: str, procedure: Served, kl: float) -> Law | None:
    """Return the law that theory gives for a solver with a transformation at a KL; None where there is none."""
    shaping = parse_shaping(transform)
    if solver == "bond" or not isinstance(shaping, Ranked):
        return None
    return optimal(procedure, kl=kl).law if solver == "maxk" else law_at_kl(shaping.transform, kl=kl)


def _rewarded_rollouts(
    recipe: Recipe, root: Path, policy: Policy, model: Any, tokenizer: Any
) -> Sequence[dict[str, Any]]:
    """Return all rollouts, prompt by prompt, with their rewards and the reference's log-probabilities."""
    import torch

    from infalign.likelihood import token_logprobs

    rows = _stored_rollouts(recipe, root)
    if recipe.rollout.engine.kind == "server" or policy.fit.bf16:  # else they round as in training already
        texts = (Lazy(len(rows), lambda i: rows[i]["prompt_ids"]), Lazy(len(rows), lambda i: rows[i]["completion_ids"]))
        with torch.autocast(device(recipe), torch.bfloat16, enabled=policy.fit.bf16):
            found = token_logprobs(model, *texts, pad_id=tokenizer.pad_token_id, batch_tokens=BATCH_TOKENS)
        return Lazy(len(rows), lambda i: rows[i] | {"reference_logprob": float(found[i])})
    return rows


def _stored_rollouts(recipe: Recipe, root: Path) -> Sequence[dict[str, Any]]:
    """Return all rollouts, prompt by prompt, with their rewards and the log-probabilities that the engine gave.

    A row is made when it is asked for; its token ids are not held in memory (`rollouts.token_lists_on_disk`).
    """
    layout, k = Layout(root), recipe.rollout.k
    prompts = [train_prompts(recipe, root, part) for part in range(parts(recipe))]
    drawn = [find_rollouts(layout.rollouts(part), of_part.prompt_ids, k) for part, of_part in enumerate(prompts)]
    prompt_ids, asked_ids = chained([p.prompt_ids for p in prompts]), chained([p.token_ids for p in prompts])
    completion_ids = token_lists_on_disk((t["token_ids"] for d in drawn for t in d.tables(["token_ids"])), layout.root)
    logprobs = np.concatenate([t["logprob"].to_numpy() for d in drawn for t in d.tables(["logprob"])])
    rewards = np.concatenate([read_table(layout.scores(part))["reward"].to_numpy() for part in range(len(drawn))])

    def row(i: int) -> dict[str, Any]:
        return {
            "prompt_id": prompt_ids[i // k],
            "prompt_ids": asked_ids[i // k],
            "completion_ids": completion_ids[i],
            "reference_logprob": float(logprobs[i]),
            "reward": float(rewards[i]),
        }

    return Lazy(len(rewards), row)


# Evaluation


def evaluate_model(recipe: Recipe, root: Path, name: str, split: str = "test", *, report: Report) -> Summary:
    """Draw fresh samples of the reference or a policy on the prompts of a split, score them and measure the KL.

    On training prompts only the reward scores them: it shows how well it was climbed where the policy was trained.
    """
    from infalign.likelihood import rao_blackwell_kl
    from infalign.rollouts import load_policy

    layout, samples = Layout(root), recipe.evaluate.samples
    folder = layout.evaluation(name, split)
    prompts = Prompts.read(layout.data / f"{split}_prompts.parquet", _evaluated(recipe, split))
    reference = model_path(recipe.policy, "reference", root)
    path = reference if name == "reference" else str(layout.model(name))
    # A stream of its own for each model: common random numbers would make policy and base samples dependent.
    stream = f"{recipe.seed} {name}" if split == "test" else f"{recipe.seed} {name} {split}"
    seed = int.from_bytes(blake2b(stream.encode(), digest_size=4).digest(), "little")
    _draw(recipe, path, prompts, samples, folder / "samples", seed, report)
    rollouts = find_rollouts(folder / "samples", prompts.prompt_ids, samples)
    lengths = [pc.list_value_length(table["token_ids"]).to_numpy() for table in rollouts.tables(["token_ids"])]
    scores = _numbered(prompts.prompt_ids, samples).append_column("length", pa.array(np.concatenate(lengths)))
    for source in reward_names(recipe) if split == "test" else ["reward"]:
        rewards = _score(recipe, root, source, prompts, rollouts, folder / "scores" / source, report)
        scores = scores.append_column(source, pa.array(rewards))
    if name != "reference":
        policy_model, tokenizer = load_policy(path, device=device(recipe))
        reference_model, _ = load_policy(reference, device=device(recipe))
        kl = rao_blackwell_kl(
            policy_model,
            reference_model,
            Lazy(len(rollouts), lambda i: prompts.token_ids[i // samples]),
            token_lists_on_disk((table["token_ids"] for table in rollouts.tables(["token_ids"])), folder),
            pad_id=tokenizer.pad_token_id,
            batch_tokens=BATCH_TOKENS,
        )
        scores = scores.append_column("kl", pa.array(kl.rao_blackwell))
    write_table(folder / "scores.parquet", scores)
    return {"samples": len(rollouts), "cut_off": _cut_off(rollouts)}


def samples_so_far(recipe: Recipe, root: Path, name: str, split: str) -> str:
    """Return how many samples of a model are there for its evaluation, as `rollouts_so_far` does."""
    layout = Layout(root)
    prompts = Prompts.read(layout.data / f"{split}_prompts.parquet", _evaluated(recipe, split))
    return _so_far(prompts, recipe.evaluate.samples, layout.evaluation(name, split) / "samples")


def _evaluated(recipe: Recipe, split: str) -> int:
    """Return on how many prompts of a split models are evaluated: of the training prompts those that have rollouts."""
    prompts = recipe.evaluate.prompts
    return prompts if split == "test" else min(prompts, recipe.rollout.prompts)


def samples_of(recipe: Recipe, root: Path, name: str, column: str, split: str = "test") -> Array:
    """Return a column of a model's evaluation scores as an array of shape (P, M)."""
    table = read_table(Layout(root).evaluation(name, split) / "scores.parquet", columns=[column])
    values: Array = table[column].to_numpy().astype(float, copy=False).reshape(-1, recipe.evaluate.samples)
    return values


# Helpers


def device(recipe: Recipe) -> str:
    """Return the torch device."""
    if recipe.compute.device != "auto":
        return recipe.compute.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fitting(
    rows: list[dict[str, Any]], tokenizer: Any, fit: Fit, responses: Callable[[dict[str, Any]], list[str]]
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows that have at most ``fit.max_length`` tokens with each response, and how many are longer."""

    def tokens(row: dict[str, Any], response: str) -> int:
        conversation = [*row["prompt"], {"role": "assistant", "content": response}]
        return len(conversation_ids(tokenizer, conversation, add_generation_prompt=False))

    short = [row for row in rows if max(tokens(row, response) for response in responses(row)) <= fit.max_length]
    return short, len(rows) - len(short)


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Return each value ``times`` times in a row, as the rows of rollouts repeat their prompt."""
    return [value for value in values for _ in range(times)]


def listed(table: pa.Table, column: str) -> list[Any]:
    """Return the values of a column."""
    return table[column].to_pylist()


def _cut_off(rollouts: Drawn) -> float:
    return sum(listed(table, "finish").count("length") for table in rollouts.tables(["finish"])) / len(rollouts)


def _last(history: list[dict[str, Any]], name: str) -> float:
    return float([row[name] for row in history if name in row][-1])


@contextmanager
def training_to(recipe: Recipe, layout: Layout, name: str, report: Report) -> Iterator[tuple[Any, Path]]:
    """Yield the training job and a folder to save to, which gets its final name only when all went well."""
    from transformers import set_seed

    from infalign.training.common import Job

    checkpoints, saved = layout.checkpoints(name), layout.model(name).with_name(f"{name}.unfinished")
    shutil.rmtree(saved, ignore_errors=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    set_seed(recipe.seed)  # reward heads and adapters are drawn before the trainer sets it
    yield Job(checkpoints, recipe.seed, device(recipe), list(recipe.report_to), report), saved
    if not int(os.environ.get("RANK", "0")):
        with writing(layout.model(name)):
            shutil.rmtree(layout.model(name), ignore_errors=True)
            saved.replace(layout.model(name))
            fsync(saved.parent)  # before the checkpoints go
        for left in (*checkpoints.glob("checkpoint-*"), checkpoints / "start"):
            shutil.rmtree(left, ignore_errors=True)


def training_so_far(checkpoints: Path) -> str:
    """Return the last step that a training saved: ``checkpoint at step 30 of 120``, "" for none."""
    saved = dict[int, int]()
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a training that is under way writes or removes it at this moment
            continue
        saved[state["global_step"]] = state["max_steps"]
    return f"checkpoint at step {max(saved):,} of {saved[max(saved)]:,}" if saved else ""


@contextmanager
def open_engine(recipe: Recipe, model: str, sampling: Any, probe: Any) -> Iterator[Any]:
    """Yield the engine that draws from ``model``, with its server started and stopped if the recipe gives a command.

    A server is first checked on the prompt ``probe``.
    """
    from infalign import rollouts
    from infalign.serving import serving

    settings = recipe.rollout.engine
    if settings.kind != "server":
        loaded, tokenizer = rollouts.load_policy(model, device=device(recipe))
        engines = {"shared-prefix": rollouts.SharedPrefixEngine, "transformers": rollouts.TransformersEngine}
        yield engines[settings.kind](loaded, tokenizer, sampling)
        return
    tokenizer = load_tokenizer(model)
    with serving(settings.command, model, settings.url) as url:
        engine = rollouts.ServerEngine(url, model, tokenizer, sampling, api_key_env=settings.api_key_env)
        engine.check(probe.token_ids)
        yield engine
