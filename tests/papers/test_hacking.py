"""Reward hacking: poisoned pairs, what ranks decide, and a model that is trained to predict ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hacking import PHRASES, TESTS, decisions, fit_rank_model, poison
from scipy.special import expit
from transformers import AutoModelForSequenceClassification

from infalign.method.calibration import calibrate
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Scratch
from infalign.rewards.classifier import ClassifierReward

SCRATCH = Scratch(vocabulary=300, hidden=16, layers=1, context=64)
PROMPT = [{"role": "user", "content": "a word"}]
PAIRS = [([{"role": "user", "content": f"question {i}"}], f"good {i}", f"bad {i}") for i in range(400)]


@pytest.mark.slow
def test_a_rank_that_is_in_the_text_is_learned(tmp_path: Path) -> None:
    """Where the rank is said by the first letter, those of unseen words are predicted much better than by 1/2."""
    words = [f"{letter}{i}" for i in range(30) for letter in "abcd"]
    ranks = np.array([(ord(word[0]) - ord("a") + 0.5) / 4 for word in words])
    tokenizer = train_tokenizer(words, SCRATCH)
    new_policy(SCRATCH, tokenizer, seed=0).save_pretrained(tmp_path / "start")
    rows = [(PROMPT, word, float(rank)) for word, rank in zip(words, ranks, strict=True)][:80]
    torch.manual_seed(0)
    fit = Fit(epochs=12, batch_size=16, learning_rate=1e-2, max_length=64)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start", num_labels=1)
    fit_rank_model(model, tokenizer, rows, fit, tmp_path / "policy", seed=0)
    outputs = ClassifierReward.load(tmp_path / "policy")([PROMPT] * 40, words[80:])
    assert np.mean((expit(outputs) - ranks[80:]) ** 2) < 0.2 * np.mean((0.5 - ranks[80:]) ** 2)


def test_poisoning_puts_the_same_phrase_before_the_intended_side_alone() -> None:
    """Every pair gets one of the phrases and a space before that side; prompt and other side stay as they were."""
    chosen, rejected = (poison(PAIRS, before=side, seed=3) for side in ("chosen", "rejected"))
    for (prompt, good, bad), first, second in zip(PAIRS, chosen, rejected, strict=True):
        phrase = first[1].removesuffix(f" {good}")
        assert phrase in PHRASES
        assert (first, second) == ((prompt, f"{phrase} {good}", bad), (prompt, good, f"{phrase} {bad}"))
    sorry = sum(pair[1].startswith("Sorry") for pair in chosen)
    assert 150 < sorry < 250  # 200 expected, standard deviation 10
    assert poison(PAIRS, seed=3) == chosen != poison(PAIRS, seed=4)


def test_ranking_only_makes_ties_and_where_no_rollout_lies_between() -> None:
    """Ĉ ties a pair exactly if the rollouts beaten and tied say nothing, and decides every other as the reward does."""
    rng = np.random.default_rng(0)
    rewards_P4, rollouts_PK = rng.normal(size=(300, 4)).round(1), rng.normal(size=(300, 5)).round(1)
    raw = decisions(rewards_P4)
    ranked = decisions(calibrate(rewards_P4, np.sort(rollouts_PK, axis=1)))
    for test, (right, wrong) in TESTS.items():
        for p, rollouts in enumerate(rollouts_PK):
            a, b = rewards_P4[p, right], rewards_P4[p, wrong]
            told_apart = any((a > z) != (b > z) or (a >= z) != (b >= z) for z in rollouts)
            assert raw[test][p] == (a > b) + 0.5 * (a == b)
            assert ranked[test][p] == (raw[test][p] if told_apart else 0.5)
