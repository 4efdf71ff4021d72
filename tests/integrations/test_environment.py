"""The reward that the environment names: one core for all frameworks, and its errors."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import retries
import torch
from datasets import Dataset
from faults.server import RewardServer
from listening import listening
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import prompt_id
from infalign.integrations import environment as source
from infalign.integrations import openrlhf, verl
from infalign.integrations import trl as adapter
from infalign.integrations.environment import conversation, from_environment
from infalign.integrations.server import app
from infalign.rewards import base as rewards
from infalign.rewards.classifier import ClassifierReward
from infalign.world import gold

PROMPT = [{"role": "user", "content": "How do I bake bread?"}]
RESPONSES = ["Knead the dough.", "Please, please knead the dough and wait.", ""]
REFERENCES = [-3.0, -1.0, 0.0, 0.5, 2.0]


def score(prompt: Any, response: Any, references: list[float], *, prompt_id: str | None = None) -> Any:
    """Return what a response is worth, as an adapter asks for it."""
    return from_environment().score(conversation(prompt, prompt_id), response, references, None)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Name gold, the reward of the demo's world, by the environment; forget what was loaded before."""
    monkeypatch.setenv("INFALIGN_REWARD", "infalign.world:gold")
    monkeypatch.setenv("INFALIGN_TRANSFORM", "exp:10")
    source._loaded.cache_clear()
    yield monkeypatch
    source._loaded.cache_clear()


@pytest.fixture
def folder(calibrated_run: Path) -> Path:
    """Return the folder of a policy with a chat template; tests only read it."""
    return calibrated_run.parent / "policy"


@pytest.mark.parametrize("response", RESPONSES)
def test_the_core_gives_score_win_rate_and_reward(response: str) -> None:
    """The rank is counted by hand, and the score is e^{10(u−1)} of it."""
    (reward,) = gold([PROMPT], [response])
    rank = np.mean([1.0 if reward > z else 0.5 if reward == z else 0.0 for z in REFERENCES])
    expected = {"score": np.exp(10 * (rank - 1)), "win_rate": rank, "reward": reward}
    assert score(PROMPT, response, REFERENCES)._asdict() == pytest.approx(expected)
    called = [*PROMPT, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "4"}]
    assert [turn["content"] for turn in conversation(called, None)] == [PROMPT[0]["content"], "", "4"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("<|user|>How do I bake bread?<|end|><|assistant|>", "not rendered text (it begins '<|user|>How"),
        ([], "must be a list of messages"),
        ([{"text": "How?"}], "must be a list of messages"),
        ([{"role": "system", "content": "Be good."}, *PROMPT], "differs from the one with these reference_rewards"),
        ([{"role": "user", "content": "[INST] How? [/INST]"}], "differs from the one with these reference_rewards"),
    ],
)
def test_a_prompt_that_a_framework_has_changed_is_refused(prompt: Any, said: str) -> None:
    """Rendered to text, put under a system prompt, or with a template inside its message."""
    with pytest.raises(DataError, match=re.escape(said)):
        score(prompt, "Knead.", REFERENCES, prompt_id=prompt_id(PROMPT))


@pytest.mark.parametrize("name", ["INFALIGN_REWARD", "INFALIGN_TRANSFORM"])
def test_a_variable_that_is_not_set_is_named(environment: pytest.MonkeyPatch, name: str) -> None:
    """Before anything is scored."""
    environment.delenv(name)
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        score(PROMPT, "Knead.", REFERENCES)


def test_a_reward_server_is_named_by_its_url(environment: pytest.MonkeyPatch, folder: Path) -> None:
    """It needs the policy's tokenizer, and its key comes from the environment."""
    with RewardServer() as server, retries.attempts(1):
        environment.setenv("INFALIGN_REWARD", server.url)
        with pytest.raises(ConfigError, match="set INFALIGN_TOKENIZER"):
            score(PROMPT, "Knead.", REFERENCES)
        environment.setenv("INFALIGN_TOKENIZER", str(folder))
        environment.setenv("INFALIGN_REWARD_KEY", "secret")
        assert score(PROMPT, RESPONSES[0], REFERENCES).reward == gold([PROMPT], [RESPONSES[0]])[0]
        assert server.headers[0]["Authorization"] == "Bearer secret"


def test_special_tokens_reach_the_reward(environment: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    """TRL's texts lack them, ours only BOS, EOS and padding; a function of TRL's form gets what TRL has."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def ours(responses):\n    return Path(__file__).with_name('ours').write_text(repr(responses)) and [0.0]\n"
        "def trl(completions, completion_ids):\n"
        "    return Path(__file__).with_name('trl').write_text(repr((completions, completion_ids))) and [0.0]\n"
    )
    environment.setenv("INFALIGN_TOKENIZER", str(folder))
    ids = AutoTokenizer.from_pretrained(folder)("Knead <|user|> it.<|end|><|pad|>")["input_ids"]
    said = [{"role": "assistant", "content": "Knead  it."}]
    for form, expected in (("ours", ["Knead <|user|> it."]), ("trl", ([said], [ids]))):
        environment.setenv("INFALIGN_REWARD", f"{tmp_path / 'mine.py'}:{form}")
        source._loaded.cache_clear()
        adapter.reward([PROMPT], [said], [REFERENCES], completion_ids=[ids], trainer_state=object())
        assert (tmp_path / form).read_text() == repr(expected)


FORMS = """
def ours(prompts, responses, answer, extra_info):
    return [len(r) + 10 * int(a) + 100 * e["level"] for r, a, e in zip(responses, answer, extra_info)]

def trl(prompts, completions, answer, extra_info, log_extra, **columns):
    assert columns.keys().isdisjoint({"responses", "solution_str"})
    return ours(prompts, [said[0]["content"] for said in completions], answer, extra_info)

def verl(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums"
    return {"score": ours([""], [solution_str], [ground_truth], [extra_info])[0]}
"""


def calibrated(prompt: Any, references: list[float], columns: str) -> dict[str, Any]:
    """Return a row of calibrated.parquet, of a prompt without an id."""
    return {"prompt": prompt, "prompt_id": None, "reference_rewards": references, "columns": columns}


@pytest.mark.parametrize("form", ["ours", "trl", "verl"])
def test_a_function_gets_from_every_adapter_what_it_gets_in_a_run(
    environment: pytest.MonkeyPatch, folder: Path, tmp_path: Path, form: str
) -> None:
    """Columns of an exported row reach it by name, other than those by whose name it gets something else."""
    (tmp_path / "mine.py").write_text(FORMS)
    environment.setenv("INFALIGN_REWARD", f"{tmp_path / 'mine.py'}:{form}")
    environment.setenv("INFALIGN_TOKENIZER", str(folder))
    known = {"data_source": "sums", "answer": "5", "reward_model": {"ground_truth": "5"}, "extra_info": {"level": 2}}
    columns = json.dumps(known | {"responses": ["old"], "prompts": "old", "solution_str": "old", "log_metric": "old"})
    exported = calibrated([{"role": "user", "content": "2 + 3?"}], [0.0, 153.0, 254.0], columns)
    run = from_environment().reward
    (expected,) = rewards.score(run, [exported["prompt"]], ["five"], columns=[columns], name="mine")
    assert expected == 254.0

    named = {name: [value] for name, value in adapter.row(exported).items() if name != "prompt"}
    logged: dict[str, float] = {}
    asked = named | {"columns": [columns]}
    (shaped,) = adapter.reward([exported["prompt"]], ["five"], **asked, log_metric=logged.__setitem__)
    row = verl.row(exported)
    truth = row["reward_model"]["ground_truth"]
    label = openrlhf.row(exported)["label"]
    rendered = "<|user|>2 + 3?<|end|><|assistant|>"
    with listening(app(from_environment(), None)) as url:
        body = {"prompt": rendered, "response": "five", "label": label}
        served = httpx2.post(f"{url}/get_reward", json=body).raise_for_status().json()
    by_verl = verl.compute_score(row["data_source"], "five", truth, row["extra_info"])
    by_openrlhf = openrlhf.reward_func([f"{rendered}five<|end|>"], [rendered], [label])
    rewards_found = (logged["reward_model"], by_verl["reward"], by_openrlhf["scores"].item(), served["reward"])
    assert rewards_found == (expected,) * 4
    scores = (shaped, by_verl["score"], by_openrlhf["rewards"].item(), served["score"])
    assert scores == pytest.approx([np.exp(10 * (5 / 6 - 1))] * 4, rel=1e-6)  # it beats two of three and ties with one
    assert verl.row(calibrated(exported["prompt"], [0.0], '{"answer": "5"}'))["reward_model"]["ground_truth"] == "5"


def test_what_verl_passes_wins_over_a_column_and_the_column_is_named(
    environment: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Columns that are no object are refused."""
    (tmp_path / "mine.py").write_text(FORMS)
    environment.setenv("INFALIGN_REWARD", f"{tmp_path / 'mine.py'}:verl")
    columns = '{"data_source": "old", "extra_info": {"level": 2}}'
    extra = verl.row(calibrated(PROMPT, REFERENCES, columns))["extra_info"]
    assert verl.compute_score("sums", "five", "5", extra)["reward"] == 254.0
    assert "the column data_source is left out: a reward function gets what verl gives" in caplog.text
    with pytest.raises(DataError, match="columns must be a JSON object; it begins 'level'"):
        verl.compute_score("sums", "five", "5", extra | {"columns": "level"})


def test_threads_share_a_classifier(environment: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    """A folder names a classifier; asked by eight threads at once it gives each what it gives one."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_labels": 1, "max_position_embeddings": 192, "pad_token_id": 0}
    LlamaForSequenceClassification(LlamaConfig(**shape | heads)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    environment.setenv("INFALIGN_REWARD", str(tmp_path))
    texts = [f"Knead the dough {'please ' * i}." for i in range(32)]
    alone = ClassifierReward.load(tmp_path)([PROMPT] * 32, texts)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda text: score(PROMPT, text, REFERENCES).reward, texts))
    assert len(set(alone)) > 16
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("adapter", ["trl", "verl", "openrlhf"])
def test_an_adapter_is_imported_alone_and_light(adapter: str) -> None:
    """Importing it loads neither torch nor any framework nor another adapter."""
    heavy = "{'torch', 'transformers', 'trl', 'verl', 'openrlhf', 'datasets', 'httpx2'}"
    others = "{name for name in sys.modules if name.startswith('infalign.integrations.')}"
    code = f"import sys, infalign.integrations.{adapter}; print(sorted({heavy} & set(sys.modules)), sorted({others}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"[] {sorted(['infalign.integrations.environment', f'infalign.integrations.{adapter}'])}\n"


# TRL


@pytest.mark.slow
def test_trls_command_trains_with_the_reward_by_its_name(tmp_path: Path, folder: Path) -> None:
    """`trl rloo --reward_funcs infalign.integrations.trl.reward`: no Python, offline, and its log has the win rate."""
    rows = [{"prompt": PROMPT, "prompt_id": prompt_id(PROMPT), "reference_rewards": REFERENCES}] * 8
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train.parquet")
    places = f"--model_name_or_path {folder} --dataset_name {tmp_path / 'data'} --output_dir {tmp_path / 'out'}"
    sizes = "--num_generations 4 --per_device_train_batch_size 8 --max_completion_length 8 --max_steps 1"
    options = "--beta 0.1 --logging_steps 1 --report_to none --save_strategy no --bf16 False"
    options += " --gradient_checkpointing False --reward_funcs infalign.integrations.trl.reward"
    trl = [Path(sys.executable).with_name("trl"), "rloo", "--use_cpu"]
    command = [*trl, *f"{places} {sizes} {options}".split()]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | offline)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rewards/reward/mean" in done.stdout
    assert "win_rate" in done.stdout


def test_a_trl_dataset_with_the_calibration_of_other_prompts_is_refused() -> None:
    """TRL would train on whatever comes back."""
    with pytest.raises(DataError, match="differs from the one with these reference_rewards"):
        adapter.reward([PROMPT], ["Knead."], [REFERENCES], ["0123456789abcdef"])
