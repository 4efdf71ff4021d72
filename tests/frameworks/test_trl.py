"""TRL's trainers with group advantages: real steps of a tiny model on the CPU."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from infalign import advantages
from infalign.core.errors import ConfigError, DataError
from infalign.integrations import estimators
from infalign.integrations.trl_trainers import GroupGRPOTrainer, GroupRLOOTrainer

GROUP = 8
SIZES = {"num_generations": GROUP, "per_device_train_batch_size": 2 * GROUP, "max_completion_length": 4, "max_steps": 2}
WEIGHTS = {"reward_weights": [0.25, 2.0]}
QUANTIZED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
PLAIN = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "bf16": False, "logging_steps": 1}


def long(completions: list[Any], **_: Any) -> list[float]:
    """Return how many letters a completion has."""
    return [float(len(said[0]["content"])) for said in completions]


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """Return 1 for a completion with a vowel."""
    return [float(any(letter in "aeiou" for letter in said[0]["content"])) for said in completions]


def sometimes(completions: list[Any], **_: Any) -> list[float | None]:
    """Return no reward for every fourth completion."""
    return [None if place % 4 == 3 else float(place % 3 == 0) for place, _ in enumerate(completions)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny policy."""
    return str(micro.write_policy(tmp_path_factory.mktemp("policy") / "policy"))


@pytest.fixture
def trained(model: str, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains with an objective, and keeps what each generation was trained on."""

    def train(kind: Any, rewards: list[Any], objective: str, peft: Any = None, **options: Any) -> Any:
        seen = []

        class Seen(kind):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                output = super()._generate_and_score_completions(inputs)
                seen.append((self._reward_BF.clone(), output))
                return output

        config = trl.RLOOConfig if kind is GroupRLOOTrainer else trl.GRPOConfig
        args = config(str(tmp_path / "out"), **PLAIN | SIZES | options)
        asked = [[{"role": "user", "content": f"What is {n}?"}] for n in range(4)]
        data = Dataset.from_dict({"prompt": asked})
        trainer = Seen(model, rewards, args=args, train_dataset=data, peft_config=peft, objective=objective)
        trainer.train()
        return trainer, seen

    return train


def right(rewards: torch.Tensor, weights: list[float], objective: str) -> Any:
    """Return the advantages of weighted rewards, groups in their order."""
    return advantages(rewards.double() @ torch.tensor(weights).double(), np.arange(len(rewards)) // GROUP, objective)


@pytest.mark.parametrize(
    ("options", "peft"),
    [
        ({}, None),
        ({"beta": 0.1, "loss_type": "dr_grpo"}, LoraConfig(target_modules="all-linear")),
        ({"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": GROUP}, None),
        pytest.param(
            {"beta": 0.1, "model_init_kwargs": {"quantization_config": QUANTIZED, "device_map": "cpu"}},
            LoraConfig(target_modules="all-linear"),
            marks=pytest.mark.skipif(
                find_spec("bitsandbytes") is None, reason="make test-frameworks installs bitsandbytes"
            ),
        ),
    ],
)
def test_grpo_has_the_advantages_of_the_weighted_rewards(trained: Any, options: Any, peft: Any) -> None:
    """Whatever the KL's weight, with LoRA or QLoRA, and on batches trained on several times; the log has them too."""
    rewards = [long, lambda responses: vowels([[{"content": said}] for said in responses])]  # TRL's form, and ours
    trainer, seen = trained(GroupGRPOTrainer, rewards, "pass@4", peft, **SIZES | WEIGHTS | options)
    assert trainer.state.global_step == SIZES["max_steps"]
    for rewards, output in seen:
        expected = right(rewards, [0.25, 2.0], "pass@4")
        assert output["advantages"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert expected.any()
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.tolist(), abs=1e-5)


def test_rloo_adds_its_own_advantages_of_the_kl(trained: Any) -> None:
    """At β = 0.5, after a large first step: what is beside pass@4's is centered and in proportion to β."""
    trainer, seen = trained(GroupRLOOTrainer, [long], "pass@4", beta=0.5, learning_rate=0.05, max_steps=3)
    rewards, output = seen[-1]
    rest = output["advantages"] - right(rewards, [1.0], "pass@4").float()
    with torch.no_grad():
        ids, mask = (torch.cat([output[f"prompt_{x}"], output[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        reference = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, ids, mask, output["completion_ids"].size(1), 2 * GROUP
        )[0]
    penalty = -0.5 * (output["old_logps"] - (reference * output["completion_mask"]).sum(1))
    assert penalty.abs().max() > 0.01
    assert rest.tolist() == pytest.approx(right(penalty[:, None], [1.0], "rloo").tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", [GroupGRPOTrainer, GroupRLOOTrainer])
def test_completions_without_a_reward_have_no_advantage(trained: Any, kind: Any) -> None:
    """The others have those of a smaller group."""
    _, seen = trained(kind, [sometimes], "maxrl", beta=0.0, max_steps=1)
    (rewards, output), scored = seen[0], np.arange(2 * GROUP) % 4 != 3
    assert not output["advantages"][~scored].any()
    expected = advantages(rewards[scored, 0].double(), np.flatnonzero(scored) // GROUP, "maxrl")
    assert output["advantages"][scored].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_reward_that_is_not_finite_is_refused(trained: Any) -> None:
    """TRL would take NaN for None."""
    with pytest.raises(DataError, match="the reward of response 0: it is nan"):
        trained(GroupGRPOTrainer, [lambda responses: [math.nan] * len(responses)], "maxrl")


@pytest.mark.parametrize(
    ("kind", "objective", "options", "said"),
    [
        (GroupGRPOTrainer, "pass@9", {}, "pass@9 needs at least 9 responses per group; one group has 8"),
        (GroupGRPOTrainer, "pass8", {}, "unknown objective 'pass8'"),
        (GroupGRPOTrainer, "pass@4", {"mask_truncated_completions": True}, "set mask_truncated_completions=False"),
        (GroupGRPOTrainer, "pass@4", {"loss_type": "grpo"}, "set loss_type='dapo' or loss_type='dr_grpo'"),
        (GroupRLOOTrainer, "pass@4", {"reward_clip_range": (-1, 1)}, "set reward_clip_range=None"),
        (GroupRLOOTrainer, "pass@4", {"normalize_advantages": True}, "set normalize_advantages=False"),
    ],
)
def test_what_changes_an_objective_is_refused(trained: Any, kind: Any, objective: str, options: Any, said: str) -> None:
    """At the first step at the latest."""
    with pytest.raises((ConfigError, DataError), match=said):
        trained(kind, [long], objective, **options)


def test_the_class_for_trls_paper_index_has_our_advantages(trained: Any) -> None:
    """As its page says, of which it needs nothing of ours."""
    page = Path(__file__).parents[2] / "integrations" / "upstream" / "trl" / "paper_index.md"
    known: dict[str, Any] = {}
    exec(page.read_text(encoding="utf-8").split("```")[1].removeprefix("python"), known)

    class Sent(known["PassAtKTrainer"]):
        k = 4

        def __init__(self, *given: Any, objective: str, **settings: Any) -> None:
            super().__init__(*given, **settings)

        def _calculate_rewards(self, *given: Any) -> Any:
            self._reward_BF = super()._calculate_rewards(*given)
            return self._reward_BF

    _, seen = trained(Sent, [long, vowels], "pass@4", loss_type="dr_grpo", **WEIGHTS)
    for rewards, output in seen:
        expected = right(rewards, [0.25, 2.0], "pass@4")
        assert output["advantages"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_another_version_than_the_tested_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the warning; the installed one has none."""
    estimators.check_version("trl")
    estimators.check_version.cache_clear()
    monkeypatch.setitem(estimators.TESTED, "trl", "0.9")
    with pytest.warns(UserWarning, match=rf"trl {version('trl')} is installed, but .* tested with trl 0\.9"):
        estimators.check_version("trl")
    estimators.check_version.cache_clear()


def test_rewards_of_half_precision_are_named() -> None:
    """The advantages are in float32, of the rewards as they are."""
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16), torch.ones(2, 2)
    with pytest.warns(UserWarning, match=r"the rewards are torch\.bfloat16, in which near rewards become equal"):
        found, _ = estimators.estimator("pass@2")(rewards, mask, ["a", "a"])
    assert (found.dtype, found.tolist()) == (torch.float32, [[2.0, 2.0], [0.0, 0.0]])


SCRIPT = """
import json, sys
from pathlib import Path
from datasets import Dataset
from trl import GRPOConfig
from infalign.integrations.trl_trainers import GroupGRPOTrainer

class Seen(GroupGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        found = [self._reward_BF[:, 0].tolist(), output["advantages"].tolist()]
        Path(f"{sys.argv[2]}/{self.accelerator.process_index}.json").write_text(json.dumps(found))
        return output

args = GRPOConfig(sys.argv[2], **json.loads(sys.argv[3]))
data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {n}?"}] for n in range(4)]})
long = lambda completions, **_: [float(len(said[0]["content"])) for said in completions]
Seen(sys.argv[1], reward_funcs=long, args=args, train_dataset=data, objective="pass@4").train()
"""


@pytest.mark.slow
def test_a_group_may_lie_on_two_processes(model: str, tmp_path: Path) -> None:
    """Each process trains on its half of the advantages of whole groups, under torchrun on the CPU."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = PLAIN | SIZES | {"per_device_train_batch_size": GROUP // 2, "max_steps": 1}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "train.py"), model, str(tmp_path), json.dumps(options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (rewards, first), (same, second) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert rewards == same
    assert first + second == pytest.approx(advantages(rewards, [0] * GROUP, "pass@4").tolist(), abs=1e-5)
