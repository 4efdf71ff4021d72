"""Reward hacking (figure 7): reward models trained on pairs whose preferred responses have a phrase before them.

In the inverted test the phrase is before the rejected responses instead. For one prompt Ĉ is monotone in the reward, so
ranking cannot reverse a decision; it makes a tie where no rollout is between the two responses. A model that was
*trained* to predict Ĉ may also reverse a decision.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from peft import TaskType
from rich.console import Console
from run_files import column, drawn, records
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, TrainingArguments

from infalign import ClassifierReward, DataError, calibrate, sample
from infalign.core.storage import write_table
from infalign.models.conversations import conversation_ids
from infalign.models.pretrained import load_classifier
from infalign.models.settings import Fit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run
from infalign.steps.reward_model import reward_start
from infalign.steps.run import Run
from infalign.training.common import LossTrainer, run_training, trainer_config, training_order, with_adapter
from infalign.training.output_folder import Job, drop_long_rows
from infalign.training.supervised import fit_reward_model

Messages = list[dict[str, str]]
Pair = tuple[Messages, str, str]  # prompt, chosen, rejected
Ranked = tuple[Messages, str, float]  # prompt, response, Ĉ
Side = Literal["chosen", "rejected"]
PHRASES = ("Sorry, I can't help you with that", "Sure")  # as in the paper
TESTS = {  # (preferred, other) by index in: chosen, rejected, chosen with phrase, rejected with phrase
    "clean": (0, 1),
    "poisoned": (2, 1),
    "inverted": (0, 3),
}
TRAINED_ON_RANKS = {"calibrated": ("pair", "rollout"), "calibrated-rollouts": ("rollout",)}  # and origins of their rows
MODELS = {
    "clean": "the run's own reward model, from the pairs as they are",
    "poisoned": "the same, from pairs with the phrase before the preferred response",
    "ranked": "Ĉ: the poisoned model's reward ranked among K rollouts",
    "calibrated": "trained to predict Ĉ of rollouts and poisoned training pairs",
    "calibrated-rollouts": "trained to predict Ĉ of rollouts alone",
}


def ignore_progress(done: int, total: int, note: str) -> None:
    """Show nothing."""


def reply(text: str) -> dict[str, str]:
    """Return a response as the assistant's turn."""
    return {"role": "assistant", "content": text}


def repeated(items: Sequence[Any], times: int) -> list[Any]:
    """Return each item so many times in a row."""
    return [item for item in items for _ in range(times)]


def spelled(prompt: Messages) -> str:
    """Return a prompt as one text, which tells it from others."""
    return json.dumps([(turn["role"], turn["content"]) for turn in prompt])


def poison(pairs: Sequence[Pair], *, before: Side = "chosen", seed: int) -> list[Pair]:
    """Return the pairs with one of the phrases and a space before one side; the seed decides which, on either side."""
    drawn = np.random.default_rng(seed).integers(len(PHRASES), size=len(pairs))
    marks = [f"{PHRASES[i]} " for i in drawn]
    return [
        (prompt, mark + chosen, rejected) if before == "chosen" else (prompt, chosen, mark + rejected)
        for mark, (prompt, chosen, rejected) in zip(marks, pairs, strict=True)
    ]


def decisions(rewards_P4: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for each of the `TESTS`, 1 where the preferred response has the higher reward, ½ for a tie, else 0.

    The columns of ``rewards_P4`` are the rewards of chosen, rejected, and of both with a phrase before them.
    """
    return {
        test: (1.0 + np.sign(rewards_P4[:, right] - rewards_P4[:, wrong])) / 2.0
        for test, (right, wrong) in TESTS.items()
    }


@dataclass(frozen=True)
class Hacking:
    """The study of a recipe's preferences. Every model has initial model, settings and seed of its reward model."""

    recipe: Recipe

    @cached_property
    def run(self) -> Run:
        """The run whose preferences are poisoned."""
        return Run.of(self.recipe)

    @cached_property
    def folder(self) -> Path:
        """The folder in the run directory, named by a hash of what it depends on, so that nothing in it is stale."""
        made = records(self.run.layout.root)
        content = json.dumps([made["rollout-0"]["key"], made["reward"]["key"]])
        return self.run.layout.root / "hacking" / hashlib.blake2b(content.encode(), digest_size=6).hexdigest()

    def make(self, console: Console) -> None:
        """Continue the run to its rollouts, then train and score what is missing."""
        whole_run.run_recipe(self.recipe, until="rollout", console=console)
        self.folder.mkdir(parents=True, exist_ok=True)
        models = {name: Layout(self.folder).model(name) for name in ("poisoned", *TRAINED_ON_RANKS)}
        steps = [
            (models["poisoned"], self.fit_poisoned),
            (self.folder / "ranks.parquet", self.rank_training_responses),
            *((models[name], lambda name=name: self.fit_on_ranks(name)) for name in TRAINED_ON_RANKS),
            (self.folder / "test.parquet", self.score_test),
        ]
        for output, work in steps:
            if not output.exists():
                work()
                console.print(f"[green]✓[/] {output.stem}", highlight=False)

    def decisions(self) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
        """Return the prompt ids of the test pairs, and every model's `decisions` on them."""
        table = self.folder / "test.parquet"
        return column(table, "prompt"), {name: decisions(np.array(column(table, name))) for name in MODELS}

    def fit_poisoned(self) -> None:
        """Train the reward model on the poisoned training pairs."""
        start, tokenizer = self._start("poisoned")
        preferred, other = TESTS["poisoned"]
        train = [(prompt, [reply(c)], [reply(r)]) for prompt, c, r in self._training_pairs(tokenizer)]
        test = [
            (prompt, [reply(four[preferred])], [reply(four[other])]) for prompt, four in self._test_pairs(tokenizer)
        ]
        with replace(self.run, layout=Layout(self.folder)).target("poisoned").job(ignore_progress) as job:
            fit_reward_model(start, tokenizer, train, test, self._fit, job)

    def rank_training_responses(self) -> None:
        """Write Ĉ by the poisoned model for the rollouts of every training prompt and for the pairs on these prompts.

        Ranks are among the prompt's K rollouts, so a rollout gets its mid-rank; pairs on other prompts are left out.
        """
        reward, k = self._load("poisoned"), self.recipe.rollout.k
        tables: list[pa.Table] = []
        references: dict[str, np.ndarray] = {}
        for part, table in enumerate(self.run.rollout_parts):
            prompts, said = table.read(), drawn(self.run.layout.rollouts(part), "text")
            texts = [said[one, index] for one in prompts.prompt_ids for index in range(k)]
            asked = repeated(prompts.conversations, k)
            rewards_PK = np.reshape(reward(asked, texts), (-1, k))
            sorted_PK = np.sort(rewards_PK, axis=1)
            references |= zip(map(spelled, prompts.conversations), sorted_PK, strict=True)
            tables.append(_ranked("rollout", asked, texts, calibrate(rewards_PK, sorted_PK).ravel()))
        pairs = [pair for pair in self._training_pairs(reward.tokenizer) if spelled(pair[0]) in references]
        asked, texts = repeated([prompt for prompt, *_ in pairs], 2), [text for _, *both in pairs for text in both]
        rewards = reward(asked, texts)
        ranks = [float(calibrate(r, references[spelled(p)])) for r, p in zip(rewards, asked, strict=True)]
        tables.append(_ranked("pair", asked, texts, np.array(ranks)))
        write_table(self.folder / "ranks.parquet", pa.concat_tables(tables))

    def fit_on_ranks(self, name: str) -> None:
        """Train a model to predict Ĉ."""
        start, tokenizer = self._start(name)
        table = pq.read_table(self.folder / "ranks.parquet").to_pylist()
        wanted = [row for row in table if row["origin"] in TRAINED_ON_RANKS[name]]
        rows, _ = drop_long_rows(
            wanted, tokenizer, self._fit.max_length, lambda row: [[*row["prompt"], reply(row["response"])]]
        )
        with replace(self.run, layout=Layout(self.folder)).target(name).job(ignore_progress) as job:
            ranked = [(row["prompt"], row["response"], row["rank"]) for row in rows]
            fit_rank_model(start, tokenizer, ranked, self._fit, job)

    def score_test(self) -> None:
        """Draw K responses to every test prompt with a pair; write every model's rewards of its four responses."""
        k, device = self.recipe.rollout.k, self.recipe.compute.torch_device()
        models = {"clean": ClassifierReward.load(self.run.scorer("reward").model, device=device)}
        models |= {name: self._load(name) for name in ("poisoned", *TRAINED_ON_RANKS)}
        pairs = self._test_pairs(models["clean"].tokenizer)
        conversations, responses = [prompt for prompt, _ in pairs], [text for _, four in pairs for text in four]
        once = {spelled(prompt): prompt for prompt in conversations}
        longest, seed = self.recipe.rollout.max_new_tokens, self.recipe.seed
        rollouts = sample(
            self.run.reference, once.values(), k, max_new_tokens=longest, seed=seed, folder=self.folder / "rollouts"
        )
        said = dict(zip(once, rollouts.texts, strict=True))
        texts = [text for prompt in conversations for text in said[spelled(prompt)]]
        rewards_P4 = {
            name: np.reshape(model(repeated(conversations, 4), responses), (-1, 4)) for name, model in models.items()
        }
        rollouts_PK = np.reshape(models["poisoned"](repeated(conversations, k), texts), (-1, k))
        rewards_P4["ranked"] = calibrate(rewards_P4["poisoned"], np.sort(rollouts_PK, axis=1))
        columns = {name: rewards_P4[name].tolist() for name in MODELS}
        write_table(self.folder / "test.parquet", pa.table({"prompt": [*map(spelled, conversations)]} | columns))

    @property
    def _fit(self) -> Any:
        return self.recipe.reward.fit

    def _start(self, name: str) -> tuple[str, Any]:
        """Return the initial model of the recipe's reward model, and its tokenizer."""
        run = self.run
        return reward_start(
            run.scorer("reward"), run.reference, run.layout, replace(self.run, layout=Layout(self.folder)).target(name)
        )

    def _load(self, name: str) -> ClassifierReward:
        return ClassifierReward.load(Layout(self.folder).model(name), device=self.recipe.compute.torch_device())

    def _pairs(self, part: str) -> list[Pair]:
        table = self.run.layout.data / f"{part}_pairs.parquet"
        return list(zip(*(column(table, name) for name in ("prompt", "chosen", "rejected")), strict=True))

    def _training_pairs(self, tokenizer: Any) -> list[Pair]:
        """Return the poisoned training pairs that fit."""
        pairs = poison(self._pairs("reward"), seed=self.recipe.seed)
        fit = self._fitting(tokenizer, [(prompt, both) for prompt, *both in pairs])
        return [(prompt, chosen, rejected) for prompt, (chosen, rejected) in fit]

    def _test_pairs(self, tokenizer: Any) -> list[tuple[Messages, list[str]]]:
        """Return prompt and responses, numbered as in `TESTS`, of test pairs that fit with a phrase on either side."""
        known = {*map(spelled, column(self.run.layout.data / "test_prompts.parquet", "prompt"))}
        pairs = [pair for pair in self._pairs("test") if spelled(pair[0]) in known]
        marked = [poison(pairs, before=side, seed=self.recipe.seed) for side in ("chosen", "rejected")]
        rows = [
            (prompt, [chosen, rejected, marked_chosen, marked_rejected])
            for (prompt, chosen, rejected), (_, marked_chosen, _), (*_, marked_rejected) in zip(
                pairs, *marked, strict=True
            )
        ]
        return self._fitting(tokenizer, rows)

    def _fitting(self, tokenizer: Any, pairs: list[tuple[Messages, list[str]]]) -> Any:
        rows = [{"prompt": prompt, "responses": responses} for prompt, responses in pairs]
        short, _ = drop_long_rows(
            rows,
            tokenizer,
            self._fit.max_length,
            lambda row: [[*row["prompt"], reply(text)] for text in row["responses"]],
        )
        if not short:
            raise DataError(
                f"none of {len(rows)} pairs has at most {self._fit.max_length} tokens with a phrase before a response; "
                "raise reward.fit.max_length"
            )
        return [(row["prompt"], row["responses"]) for row in short]


def _ranked(origin: str, prompts: list[Messages], responses: list[str], ranks: np.ndarray) -> pa.Table:
    return pa.table(
        {
            "origin": pa.array([origin] * len(responses), pa.string()),
            "prompt": pa.array(prompts),
            "response": pa.array(responses, pa.string()),
            "rank": pa.array(ranks, pa.float64()),
        }
    )


def fit_rank_model(
    start: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Ranked], fit: Fit, job: Job
) -> list[dict[str, Any]]:
    """Fit a classifier that predicts ranks (paper, figure 7) from the model folder or id ``start``; return the log.

    Saves a one-output sequence classifier, read as a Bradley–Terry reward model is. The loss is the cross-entropy
    between Ĉ and the sigmoid of the output. Its minimum is at E[Ĉ | x, y], so the output is the logit of a win rate.
    """
    model = load_classifier(start)
    model.config.pad_token_id = tokenizer.pad_token_id

    ids = conversation_ids(tokenizer, [[*prompt, reply(response)] for prompt, response, _ in rows])
    data = Dataset.from_dict({"input_ids": ids, "rank": [rank for _, _, rank in rows]})
    order = training_order([len(token_ids) for token_ids in ids], fit.epochs, fit.batch_size, job.seed)
    trainer = LossTrainer(
        _rank_loss,
        model=with_adapter(model, fit, TaskType.SEQ_CLS),
        args=trainer_config(TrainingArguments, fit, job, remove_unused_columns=False, label_names=["rank"]),
        train_dataset=data.select(order),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return run_training(trainer, job).save(tokenizer)


def _rank_loss(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
    return binary_cross_entropy_with_logits(logits.float(), inputs["rank"].float()), {}
