"""Reward hacking (figure 7): reward models trained on pairs whose preferred responses have a phrase before them.

In the inverted test the phrase is before the rejected responses instead. For one prompt Ĉ is monotone in the reward, so
ranking cannot reverse a decision; it makes a tie where no rollout is between the two responses. A model that was
*trained* to predict Ĉ may also reverse a decision.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from run_files import Recipe, column, drawn, finish, records
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from infalign import ClassifierReward, DataError, calibrate, sample

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

    @property
    def root(self) -> Path:
        """The run directory."""
        return Path(self.recipe.run_dir)

    @property
    def reference(self) -> str:
        """The folder or hub id of the reference policy."""
        policy = self.recipe.policy
        return str(self.root / "models" / "reference" if policy.fit is not None else policy.model)

    @cached_property
    def folder(self) -> Path:
        """The folder in the run directory, named by a hash of what it depends on, so that nothing in it is stale."""
        made = records(self.root)
        content = json.dumps([made["rollout-0"]["key"], made["reward"]["key"]])
        return self.root / "hacking" / hashlib.blake2b(content.encode(), digest_size=6).hexdigest()

    def model(self, name: str) -> Path:
        """Return the folder of a reward model."""
        run_dir, trained = self.root if name == "clean" else self.folder / name, name in TRAINED_ON_RANKS
        return run_dir if trained else run_dir / "models" / "reward"

    def make(self) -> None:
        """Continue the run to its rollouts, then train and score what is missing."""
        finish(self.recipe, "rollout")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fit_poisoned()
        steps = [
            (self.folder / "ranks.parquet", self.rank_training_responses),
            *((self.model(name), lambda name=name: self.fit_on_ranks(name)) for name in TRAINED_ON_RANKS),
            (self.folder / "test.parquet", self.score_test),
        ]
        for output, work in steps:
            if not output.exists():
                work()
                print(f"✓ {output.stem}", flush=True)

    def decisions(self) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
        """Return the prompt ids of the test pairs, and every model's `decisions` on them."""
        table = self.folder / "test.parquet"
        return column(table, "prompt"), {name: decisions(np.array(column(table, name))) for name in MODELS}

    def fit_poisoned(self) -> None:
        """Train the reward model on the poisoned training pairs, in a run of its own on them."""
        marked = {"train": poison(self._pairs("reward"), seed=self.recipe.seed)}
        marked["test"] = poison(self._pairs("test"), seed=self.recipe.seed)
        for name, pairs in marked.items():
            rows = ({"prompt": p, "chosen": [reply(c)], "rejected": [reply(r)]} for p, c, r in pairs)
            (self.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings = self.recipe.model_dump(mode="json") | {"run_dir": str(self.folder / "poisoned")}
        files = {
            "sources": [{"path": str(self.folder / "train.jsonl")}],
            "test": [{"path": str(self.folder / "test.jsonl")}],
        }
        settings["data"] |= files
        settings["policy"] |= {"model": self.reference, "scratch": None, "fit": None}
        finish(Recipe.model_validate(settings | {"judge": None, "gold": None}), "reward-model")

    def rank_training_responses(self) -> None:
        """Write Ĉ by the poisoned model for the rollouts of every training prompt and for the pairs on these prompts.

        Ranks are among the prompt's K rollouts, so a rollout gets its mid-rank; pairs on other prompts are left out.
        """
        reward, k, said = self._load("poisoned"), self.recipe.rollout.k, dict[tuple[str, int], str]()
        for part in (self.root / "rollouts").glob("part-*"):
            said |= drawn(part, "text")
        table = self.root / "data" / "train_prompts.parquet"
        known = dict(zip(column(table, "prompt_id"), column(table, "prompt"), strict=True))
        asked_of = {one: prompt for one, prompt in known.items() if (one, 0) in said}
        texts, asked = [said[one, index] for one in asked_of for index in range(k)], repeated([*asked_of.values()], k)
        rewards_PK = np.reshape(reward(asked, texts), (-1, k))
        sorted_PK = np.sort(rewards_PK, axis=1)
        references = dict(zip(map(spelled, asked_of.values()), sorted_PK, strict=True))
        rollouts = _ranked("rollout", asked, texts, calibrate(rewards_PK, sorted_PK).ravel())
        pairs = [pair for pair in self._training_pairs(reward.tokenizer) if spelled(pair[0]) in references]
        asked, texts = repeated([prompt for prompt, *_ in pairs], 2), [text for _, *both in pairs for text in both]
        rewards = reward(asked, texts)
        ranks = [float(calibrate(r, references[spelled(p)])) for r, p in zip(rewards, asked, strict=True)]
        pq.write_table(
            pa.concat_tables([rollouts, _ranked("pair", asked, texts, np.array(ranks))]), self.folder / "ranks.parquet"
        )

    def fit_on_ranks(self, name: str) -> None:
        """Train a model to predict Ĉ, from where the reward model started."""
        poisoned, source = str(self.model("poisoned")), self.recipe.reward
        tokenizer = AutoTokenizer.from_pretrained(poisoned)
        table = pq.read_table(self.folder / "ranks.parquet").to_pylist()
        rows = [
            (row["prompt"], row["response"], row["rank"]) for row in table if row["origin"] in TRAINED_ON_RANKS[name]
        ]
        short = [row for row, _ in self._fitting(tokenizer, [(row, (row[0], [row[1]])) for row in rows])]
        set_seed(self.recipe.seed)
        if source.scratch is not None:
            model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(poisoned))
        else:
            start = source.model or self.reference
            model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype="float32")
        fit_rank_model(model, tokenizer, short, source.fit, self.model(name), self.recipe.seed)

    def score_test(self) -> None:
        """Draw K responses to every test prompt with a pair; write every model's rewards of its four responses."""
        k = self.recipe.rollout.k
        models = {name: self._load(name) for name in ("clean", "poisoned", *TRAINED_ON_RANKS)}
        pairs = self._test_pairs(models["clean"].tokenizer)
        conversations, responses = [prompt for prompt, _ in pairs], [text for _, four in pairs for text in four]
        once = {spelled(prompt): prompt for prompt in conversations}
        longest, seed = self.recipe.rollout.max_new_tokens, self.recipe.seed
        rollouts = sample(
            self.reference, once.values(), k, max_new_tokens=longest, seed=seed, folder=self.folder / "rollouts"
        )
        said = dict(zip(once, rollouts.texts, strict=True))
        texts = [text for prompt in conversations for text in said[spelled(prompt)]]
        rewards_P4 = {
            name: np.reshape(model(repeated(conversations, 4), responses), (-1, 4)) for name, model in models.items()
        }
        rollouts_PK = np.reshape(models["poisoned"](repeated(conversations, k), texts), (-1, k))
        rewards_P4["ranked"] = calibrate(rewards_P4["poisoned"], np.sort(rollouts_PK, axis=1))
        columns = {name: rewards_P4[name].tolist() for name in MODELS}
        pq.write_table(pa.table({"prompt": [*map(spelled, conversations)]} | columns), self.folder / "test.parquet")

    def _load(self, name: str) -> ClassifierReward:
        return ClassifierReward.load(str(self.model(name)), device=self.recipe.compute.torch_device())

    def _pairs(self, part: str) -> list[Pair]:
        table = self.root / "data" / f"{part}_pairs.parquet"
        return list(zip(*(column(table, name) for name in ("prompt", "chosen", "rejected")), strict=True))

    def _training_pairs(self, tokenizer: Any) -> list[Pair]:
        """Return the poisoned training pairs that fit."""
        pairs = poison(self._pairs("reward"), seed=self.recipe.seed)
        return [pair for pair, _ in self._fitting(tokenizer, [(pair, (pair[0], pair[1:])) for pair in pairs])]

    def _test_pairs(self, tokenizer: Any) -> list[tuple[Messages, list[str]]]:
        """Return prompt and responses, numbered as in `TESTS`, of test pairs that fit with a phrase on either side."""
        known = {*map(spelled, column(self.root / "data" / "test_prompts.parquet", "prompt"))}
        pairs = [pair for pair in self._pairs("test") if spelled(pair[0]) in known]
        marked = [poison(pairs, before=side, seed=self.recipe.seed) for side in ("chosen", "rejected")]
        rows = [
            (prompt, [chosen, rejected, marked_chosen, marked_rejected])
            for (prompt, chosen, rejected), (_, marked_chosen, _), (*_, marked_rejected) in zip(
                pairs, *marked, strict=True
            )
        ]
        return [row for row, _ in self._fitting(tokenizer, [(row, row) for row in rows])]

    def _fitting(self, tokenizer: Any, rows: Sequence[tuple[Any, tuple[Messages, Sequence[str]]]]) -> list[Any]:
        """Return those rows whose prompt with each of its responses has at most ``max_length`` tokens."""
        most = self.recipe.reward.fit.max_length

        def lengths(prompt: Messages, responses: Sequence[str]) -> Iterator[int]:
            chats = [[*prompt, reply(text)] for text in responses]
            return map(len, tokenizer.apply_chat_template(chats)["input_ids"])

        short = [row for row in rows if max(lengths(*row[1])) <= most]
        if not short:
            raise DataError(
                f"none of {len(rows)} pairs has at most {most} tokens with a phrase before a response; "
                "raise reward.fit.max_length"
            )
        return short


def _ranked(origin: str, prompts: list[Messages], responses: list[str], ranks: np.ndarray) -> pa.Table:
    return pa.table(
        {
            "origin": pa.array([origin] * len(responses), pa.string()),
            "prompt": pa.array(prompts),
            "response": pa.array(responses, pa.string()),
            "rank": pa.array(ranks, pa.float64()),
        }
    )


def fit_rank_model(model: Any, tokenizer: Any, rows: Sequence[Ranked], fit: Any, folder: Path, seed: int) -> None:
    """Fit a classifier with one output to ranks (paper, figure 7), with the settings of a reward model's fit; save it.

    It is read as a Bradley–Terry reward model is. The loss is the cross-entropy between Ĉ and the sigmoid of the
    output. Its minimum is at E[Ĉ | x, y], so the output is the logit of a win rate.
    """
    model.config.pad_token_id = tokenizer.pad_token_id
    if fit.lora is not None:
        on = {"target_modules": "all-linear", "task_type": TaskType.SEQ_CLS}
        model = get_peft_model(model, LoraConfig(r=fit.lora.rank, lora_alpha=2 * fit.lora.rank, **on))
    chats = [[*prompt, reply(response)] for prompt, response, _ in rows]
    ids = tokenizer.apply_chat_template(chats)["input_ids"]
    at_once = fit.device_batch_size or fit.batch_size
    arguments = TrainingArguments(
        str(folder.with_name(f"{folder.name}-training")),
        num_train_epochs=fit.passes,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=fit.batch_size // at_once,
        gradient_checkpointing=fit.gradient_checkpointing,
        learning_rate=fit.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        bf16=fit.bf16,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        arguments,
        DataCollatorWithPadding(tokenizer),
        Dataset.from_dict({"input_ids": ids, "labels": [rank for *_, rank in rows]}),
        compute_loss_func=_rank_loss,
    )
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    trained = model.merge_and_unload() if fit.lora is not None else model
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rank_loss(outputs: Any, ranks: Any, **_: Any) -> Any:
    return binary_cross_entropy_with_logits(outputs.logits.squeeze(-1).float(), ranks.float())
