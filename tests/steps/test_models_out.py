"""Models that go out of a run, with their card, and models from elsewhere that are measured beside one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, GenerationConfig

from infalign.core.display import amount, share
from infalign.models.pretrained import load_policy
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.training.common import save_model

BASE, COMMIT = "acme/tiny", "0" * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of the hub that holds one tiny model."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    micro.write_policy(repository / "snapshots" / COMMIT)
    return cache


@pytest.fixture(scope="module", autouse=True)
def offline(hub: Path) -> Iterator[None]:
    """Let only that cache be the hub."""
    with patch.multiple("huggingface_hub.constants", HF_HUB_CACHE=str(hub), HF_HUB_OFFLINE=True):
        yield


@pytest.fixture(scope="module")
def run(offline: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an evaluated run on that model: a policy with LoRA, one with a guide, and its student."""
    folder = tmp_path_factory.mktemp("run")
    recipe = micro.given(folder / "run", BASE)
    aware = recipe["policies"]["aware"]
    recipe["policies"] = {
        "adapted": aware | {"fit": micro.FIT | {"lora": {"rank": 2}}},
        "guided": aware | {"guide": {"trunk": "reference"}},
        "student": {"solver": "distil", "teacher": "guided", "fit": micro.FIT},
    }
    micro.answer("run", micro.write(folder / "recipe.yaml", recipe), "--until", "evaluate")
    return folder / "run"


@pytest.fixture(scope="module")
def results(run: Path) -> dict[str, Any]:
    """Return its numbers."""
    return dict(json.loads((run / "results.json").read_text()))


def test_a_model_folder_samples_as_it_was_trained(run: Path) -> None:
    """Whoever loads it draws from the whole distribution at temperature 1, and ends with the tokenizer's EOS."""
    for name in ("adapted", "student"):
        _, tokenizer = load_policy(run / "models" / name)
        found = GenerationConfig.from_pretrained(run / "models" / name)
        assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 1.0, 1.0, 0)
        assert found.eos_token_id == tokenizer.eos_token_id


def test_lora_stays_an_adapter_beside_the_merged_model(run: Path, hub: Path) -> None:
    """PEFT loads the adapter on the model it names, and its logits are those of the merged model."""
    folder = run / "models" / "adapted"
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
    config["base_model_name_or_path"] = str(hub / "models--acme--tiny" / "snapshots" / COMMIT)
    local = Path(shutil.copytree(folder / "adapter", run.parent / "adapter"))
    (local / "adapter_config.json").write_text(json.dumps(config))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        adapted = AutoPeftModelForCausalLM.from_pretrained(local)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(adapted, merged)


def test_the_card_has_the_measured_numbers_with_intervals_and_judges(run: Path, results: dict[str, Any]) -> None:
    """The hub's own reader finds the base model; the text has procedure, Φ, judges, win rates and KL."""
    card, found = ModelCard.load(run / "models" / "adapted" / "README.md"), results["policies"]["adapted"]
    assert (card.data.base_model, card.data.model_name) == (BASE, "adapted")
    said = [share(rates[name]) for rates in found["win_rates"].values() for name in ("best-of-4", "standard")]
    said += [f"KL to the reference: {amount(found['kl'], 3)} nats", "**best-of-4**", "exp:10"]
    said += ["the Python function `infalign.world:gold`; not used in training"]
    said += ["Rollouts of the reference: 12 prompts × 6 responses"]
    assert [text for text in said if text not in card.text] == []
    assert str(run) not in str(card)


def test_the_trackers_get_the_evaluation(run: Path, results: dict[str, Any]) -> None:
    """Tensorboard has each policy's KL and win rates beside its training curves."""
    for name, found in results["policies"].items():
        logged = EventAccumulator(str(run / "checkpoints" / name / "runs" / "evaluation")).Reload()

        def value(tag: str) -> float:
            (event,) = logged.Scalars(tag)  # noqa: B023 - called in the same turn
            return float(event.value)

        assert value("evaluation/kl") == pytest.approx(found["kl"]["mean"], rel=1e-5)
        assert value("evaluation/judge/best-of-4") == pytest.approx(found["win_rates"]["judge"]["best-of-4"]["mean"])
        assert value("evaluation/judge/best-of-4/low") <= value("evaluation/judge/best-of-4")


@pytest.mark.slow
def test_a_policy_from_elsewhere_is_measured_as_the_runs_own(run: Path, results: Any, tmp_path: Path) -> None:
    """A copy of a policy, drawn with another random stream, has its KL and win rates up to sampling error."""
    copy = shutil.copytree(run / "models" / "student", tmp_path / "mine")
    first = micro.answer("run", run, "--policy", copy)
    (folder,) = (run / "evaluation").glob("mine.*")
    found, own = json.loads((folder / "results.json").read_text()), results["policies"]["student"]
    assert found["kl"]["low"] <= own["kl"]["high"]
    assert own["kl"]["low"] <= found["kl"]["high"]
    assert found["win_rates"].keys() == own["win_rates"].keys()
    assert found["win_rates"]["judge"].keys() == own["win_rates"]["judge"].keys()
    assert f"KL to the reference: {found['kl']['mean']:.2f}" in first
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    assert micro.infalign("run", run, "--policy", copy)[1].splitlines()[-1] == first.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == written


def test_what_does_not_fit_is_named(run: Path, tmp_path: Path) -> None:
    """Another tokenizer or another vocabulary has no KL to the reference; nothing is drawn."""
    scratch = Scratch(**micro.SCRATCH)
    for tokenizer, tokens, said in (
        (train_tokenizer(["Quite another text, with other words!"] * 9, scratch), None, "differs from the reference's"),
        (micro.tokenizer(), 310, "has a vocabulary of 310 tokens, the reference of"),
    ):
        model = new_policy(scratch, tokenizer, seed=0)
        model.resize_token_embeddings(tokens)
        save_model(model, tokenizer, tmp_path / f"theirs-{tokens}")
        assert said in micro.refusal("run", run, "--policy", tmp_path / f"theirs-{tokens}")
    assert not list((run / "evaluation").glob("theirs*"))


def test_an_adapter_or_nothing_is_no_policy_to_measure(run: Path) -> None:
    """Each is refused with what to do."""
    adapter = run / "models" / "adapted" / "adapter"
    assert "is a LoRA adapter, but a whole model is needed here" in micro.infalign("run", run, "--policy", adapter)[2]
    assert "the folder does not exist" in micro.infalign("run", run, "--policy", "/no/where")[2]
