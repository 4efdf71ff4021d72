"""Solvers and the TRL drop-in on real, tiny models."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.training.common import save_model

SCRATCH = Scratch(vocabulary=300, hidden=32, layers=2, heads=2, context=64)
PROMPTS = [f"say {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run directory's models and calibrated prompts, tiny and random."""
    root = tmp_path_factory.mktemp("demo")
    tokenizer = train_tokenizer([*PROMPTS, "yes no maybe"], SCRATCH)
    save_model(new_policy(SCRATCH, tokenizer, seed=0), tokenizer, root / "models" / "reference")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    save_model(LlamaForSequenceClassification(config), tokenizer, root / "models" / "reward")
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt_id": text,
            "prompt": [{"role": "user", "content": text}],
            "reference_rewards": np.sort(rng.normal(scale=0.1, size=16)).tolist(),
        }
        for text in PROMPTS
    ]
    Dataset.from_list(rows).to_parquet(root / "calibrated.parquet")
    return root


def readme_example() -> str:
    """Return the README's Python example."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(example)


def test_the_readmes_example_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TRL example trains as it stands, and the logged win rate of a policy that has not moved is near 1/2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(folder)
    namespace: dict[str, Any] = {}
    exec(readme_example(), namespace)
    logs = namespace["trainer"].state.log_history
    assert [row["win_rate"] for row in logs if "win_rate" in row]
    assert all(0 < row["reward"] <= 1 for row in logs if "reward" in row)


def test_llama_from_scratch_reads_its_own_tokenizer() -> None:
    """Any text round-trips through the tokenizer, a conversation ends in EOS, and the model has its vocabulary."""
    tokenizer = train_tokenizer(PROMPTS, SCRATCH)
    text = "naïve — 東京\n\tété \U0001f600"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    model = new_policy(SCRATCH, tokenizer, seed=0)
    assert isinstance(model, LlamaForCausalLM)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
