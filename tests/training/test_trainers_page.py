"""What docs/trainers.md has for TRL runs as pasted, and reward functions get what TRL gives."""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from datasets import Dataset
from transformers import AutoTokenizer

from infalign.core.errors import DataError
from infalign.method.by_name import TRAINER
from infalign.method.reward import CalibratedReward
from infalign.policies.score import calibrate_prompts

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def test_the_code_for_trl_runs_as_pasted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model, with four short responses per prompt and one step each."""
    monkeypatch.chdir(tmp_path)
    namespace = {"MODEL": model}
    for name in ("RLOOConfig", "GRPOConfig"):
        settings, made = getattr(trl, name), {"max_steps": 1, "max_completion_length": 4, "use_cpu": True}
        monkeypatch.setattr(trl, name, lambda *a, of=settings, made=made, **b: of(*a, **b | made, report_to="none"))
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block.replace("k=32, max_new_tokens=256", "k=4, max_new_tokens=4"), namespace)
    assert 0 < namespace["best"].kl < namespace["best"].largest_kl


@pytest.mark.parametrize("trainer", [trl.RLOOTrainer, trl.GRPOTrainer])
def test_the_arguments_of_trl_are_known(trainer: Any) -> None:
    """What a trainer gives reward functions besides prompts, completions and columns."""
    source = inspect.getsource(trainer._calculate_rewards)
    given = {"completion_ids", *re.findall(r'reward_kwargs\["(\w+)"\] =', source)} - {"prompt", "completion"}
    assert given - {"environments"} == {*TRAINER} - {"environments"}
    assert given <= {*TRAINER}


def test_a_checker_gets_what_trl_gives_when_it_is_calibrated_and_in_training(model: str, tmp_path: Path) -> None:
    """Token ids beside completions in both, the state of the trainer in training, and never a column of such a name."""
    seen = []

    def checker(completions: Any, completion_ids: Any, log_metric: Any, trainer_state: Any = None, **more: Any) -> Any:
        seen.append((trainer_state and trainer_state.max_steps, sorted(more)))
        log_metric("tokens", float(np.mean([*map(len, completion_ids)])))
        assert all(words.decode(i, True) == c[0]["content"] for c, i in zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    words = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": f"What is {n}?"}] for n in range(2)]
    data = Dataset.from_dict({"prompt": asked, "answer": ["1", "2"], "responses": [["old"]] * 2})
    data = calibrate_prompts(model, data, checker, k=2, max_new_tokens=4)
    with pytest.raises(DataError, match="has the column reference_rewards already"):
        calibrate_prompts(model, data, checker)
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 1}
    args = trl.RLOOConfig(str(tmp_path / "out"), beta=0.1, use_cpu=True, report_to="none", logging_steps=1, **sizes)
    reward = CalibratedReward(checker, "identity")
    trainer = trl.RLOOTrainer(model, reward_funcs=reward, args=args, train_dataset=data)
    trainer.train()
    assert seen == [(None, ["answer", "prompts"]), (1, ["answer", "log_extra", "prompts"])]
    assert {"tokens", "win_rate"} <= trainer.state.log_history[0].keys()
