"""Solvers and the TRL drop-in on real, tiny models."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import LlamaForCausalLM

from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.sums import exercises
from infalign.training.common import save_model

SCRATCH = Scratch(vocabulary=300, hidden=32, layers=2, context=64)
PROMPTS = [exercise.prompt for exercise in exercises(10, seed=0)]


@pytest.mark.filterwarnings("ignore:what was learned gains nothing")  # of four rollouts of 16 prompts
def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Both run as they stand: the method prints the rates of its comments, and TRL logs finite rewards."""
    monkeypatch.chdir(tmp_path)
    run, rng = tmp_path / "runs" / "demo", np.random.default_rng(0)
    tokenizer = train_tokenizer([*PROMPTS, "Take 1 2"], SCRATCH)
    save_model(new_policy(SCRATCH, tokenizer, seed=0), tokenizer, run / "models" / "reference")
    calibrated = [
        {"prompt_id": text, "prompt": [{"role": "user", "content": text}], "reference_rewards": sorted(rewards)}
        for text, rewards in zip(PROMPTS, rng.integers(0, 2, (10, 16)).astype(float).tolist(), strict=True)
    ]
    Dataset.from_list(calibrated).to_parquet(run / "calibrated.parquet")
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    method, calls, inside_trl = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(method, {})
    printed = re.findall(r"pass@8 (\S+)", capsys.readouterr().out)
    assert printed == re.findall(r"\b0\.\d{3}\b", method)  # as its comments say
    small = calls.replace("600", "24").replace("400", "16").replace("k=32", "k=4").replace("import check, ", "import ")
    odd = {"check": lambda responses: [float(len(text) % 2) for text in responses]}  # a random model is never right
    exec(small.replace("reference=model", "reference=model, samples=8"), odd)
    assert re.search(r"^pass@8, % .*\(.*\)", capsys.readouterr().out, re.MULTILINE)
    namespace: dict[str, Any] = {}
    exec(inside_trl, namespace)
    rewards = [row["reward"] for row in namespace["trainer"].state.log_history if "reward" in row]
    assert rewards
    assert np.isfinite(rewards).all()


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
