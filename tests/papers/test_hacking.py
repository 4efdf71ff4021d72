"""A model that is trained to predict ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hacking import fit_rank_model
from scipy.special import expit
from transformers import AutoModelForSequenceClassification

from infalign.data.messages import Message
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Scratch
from infalign.rewards.classifier import ClassifierReward

SCRATCH = Scratch(vocabulary=300, hidden=16, layers=1, context=64)
PROMPT: list[Message] = [{"role": "user", "content": "a word"}]


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
