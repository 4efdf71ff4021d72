"""A run small enough for tests: a few rows of the built-in world and models of a few thousand parameters."""

import io
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from infalign import cli
from infalign.recipe.reading import load_recipe, write_yaml
from infalign.recipe.settings import Recipe

COMMAND = Path(sys.executable).with_name("infalign")
SCRATCH = {"vocabulary": 300, "hidden": 16, "layers": 1, "context": 192}
FIT = {"batch_size": 32, "max_length": 192}
GIVEN_FIT = FIT | {"epochs": 1, "learning_rate": 1e-3}  # of an offline policy, which would try others
GOLD = {"function": "infalign.world:gold"}
COMPUTE = {"device": "cpu", "threads": 1}
WORKERS = {"compute": COMPUTE | {"processes": 2}}


def settings(root: Path) -> dict[str, Any]:
    """Return the recipe of a whole run with every stage and both solvers, as `load_recipe` reads it."""
    return {
        "run_dir": str(root),
        "data": {"sources": [{"world": 200}], "max_prompt_tokens": 180},
        "policy": {"scratch": SCRATCH, "fit": FIT},
        "reward": {"fit": FIT},
        "judge": {"scratch": SCRATCH, "fit": FIT},
        "gold": GOLD,
        "rollout": {"prompts": 12, "k": 6, "max_new_tokens": 12},
        "policies": {
            "aware": {"transform": "exp:10", "kl_budget": 1.0, "fit": GIVEN_FIT},
            "plain": {"kl_budget": 1.0, "fit": GIVEN_FIT},
            "online": {"kl_budget": 0.5, "solver": "rloo", "generations": 4, "fit": FIT | {"batch_size": 24}},
        },
        "evaluate": {"prompts": 6, "samples": 8, "max_n": 4, "rewind": "rewind:0.75:4"},
        "compute": dict(COMPUTE),
        "allow_worthless": True,  # of two steps the first has learning rate 0, and its checkpoint may be the best
    }


def given(root: Path, policy: str) -> dict[str, Any]:
    """Return the recipe of a run that trains no model but one policy, all in one process; gold is the only reward."""
    changes = {"policy": {"model": policy}, "reward": GOLD, "judge": GOLD}
    recipe = settings(root) | changes
    recipe["policies"] = {"aware": recipe["policies"]["aware"]}
    return recipe


def tokenizer(**shape: int) -> Any:
    """Return a byte-level tokenizer with the chat template of models from scratch."""
    from infalign.models.scratch import train_tokenizer
    from infalign.models.settings import Scratch

    return train_tokenizer(["How do I write a function?", "Please explain the moon."] * 9, Scratch(**SCRATCH | shape))


def write_policy(folder: Path, **shape: int) -> str:
    """Write a random policy with its tokenizer into a folder, and return its name."""
    from infalign.models.scratch import new_policy
    from infalign.models.settings import Scratch

    words = tokenizer(**shape)
    new_policy(Scratch(**SCRATCH | shape), words, seed=0).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return all rollouts below a folder by prompt and number; how shards hold them depends on when a run stopped."""
    shards = pa.concat_tables(pq.read_table(path) for path in sorted(folder.rglob("part-*.parquet")))
    found: list[dict[str, Any]] = shards.sort_by([("prompt_id", "ascending"), ("index", "ascending")]).to_pylist()
    return found


def write(path: Path, recipe: Mapping[str, Any]) -> str:
    """Write a recipe and return its path."""
    path.write_text(write_yaml(dict(recipe)), encoding="utf-8")
    return str(path)


def again(root: Path, *overrides: str, until: str = "report") -> list[str]:
    """Run the recipe of a whole run with changes and return the names of the units that were done."""
    path = write(root / "again.yaml", settings(root))
    return done(load_recipe(path, ["compute.processes=1", *overrides]), until=until)


def evaluation(name: str) -> list[str]:
    """Return the units that evaluate a policy, in their order."""
    return [f"{work}-{name}" for work in ("samples", "kl", "evaluate")]


def brightness(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return the mean of the last hexadecimal digit of the letters, which rarely ties and can be learnt."""
    return [sum(ord(letter) % 16 for letter in text) / (1 + len(text)) for text in responses]


def infalign(*words: object) -> tuple[int, str, str]:
    """Run a command line in this process and return exit code, stdout and stderr."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    warnings = logging.StreamHandler(err)  # as without pytest, which has handlers of its own
    warnings.setLevel(logging.WARNING)
    logging.getLogger().addHandler(warnings)
    code: Any = 0
    try:
        with patch.object(sys, "argv", ["infalign", *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as stopped:
        code = stopped.code or 0
    finally:
        logging.getLogger().removeHandler(warnings)
        for number, handler in signals.items():
            signal.signal(number, handler)
        if (told := signal.set_wakeup_fd(-1)) >= 0:  # of the process that would end this one after a later signal
            os.close(told)
    return code, out.getvalue(), err.getvalue()


def answer(*words: object) -> str:
    """Run a command line that succeeds and has nothing to say on stderr, and return what it prints."""
    code, out, err = infalign(*words)
    assert (code, err) == (0, ""), err
    return out


def refusal(*words: object, code: int = 2) -> str:
    """Run a command line that prints nothing and ends with an exit code and one sentence, and return that."""
    found, out, err = infalign(*words)
    assert (found, out, err.count("\n"), err.startswith("infalign: ")) == (code, "", 1, True), err
    return err


def printed(recipe: Recipe, *, until: str = "report") -> list[str]:
    """Run a recipe in this process and return the lines that it prints."""
    from infalign.steps import whole_run

    console = Console(file=io.StringIO(), width=200)
    whole_run.run_recipe(recipe, until=until, console=console)
    return console.file.getvalue().splitlines()


def done(recipe: Recipe, *, until: str = "report") -> list[str]:
    """Run a recipe in this process and return the names of the units that were done."""
    return [line.split()[1] for line in printed(recipe, until=until) if line.startswith("✓")]


def finish(folder: Path) -> Path:
    """Do a whole run with the command line, in one process, and return its directory."""
    out = answer("run", write(folder / "recipe.yaml", settings(folder / "run")), "--debug")
    assert f"Report: {folder / 'run' / 'report.html'}" in out
    return folder / "run"


def write_gguf(policy: Any, tokenizer: Any, path: Path, *, kind: str = "gpt2", quantisation: str | None = None) -> Path:
    """Write a Llama with tied embeddings as llama.cpp's converter does; the matrices in ``quantisation``."""
    import gguf

    config, writer = policy.config, gguf.GGUFWriter(path, "llama")
    numbers = tokenizer.get_vocab()
    vocabulary = sorted(numbers, key=lambda token: numbers[token])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tokenizer_model": kind,
        "token_list": vocabulary,
        "token_types": [control if token.startswith("<|") else normal for token in vocabulary],
        "token_merges": [" ".join(pair) for pair in merges],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "chat_template": tokenizer.chat_template,
    }
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in policy.model.state_dict(prefix="model.").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp's rotary embedding pairs neighbours
            halves = tensor.view(config.num_attention_heads, 2, -1, config.hidden_size)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        ours, values = names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy()
        if quantisation is None or values.ndim == 1:
            writer.add_tensor(ours, values)
        else:
            packed = gguf.GGMLQuantizationType[quantisation]
            writer.add_tensor(ours, gguf.quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoder(folder: Path) -> Path:
    """Write a tiny BERT, which has no chat template, EOS or head for a language, and return its folder."""
    import string

    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    letters = string.ascii_lowercase + string.digits
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.punctuation, *letters, *(f"##{a}" for a in letters)]
    BertTokenizer(vocab={token: place for place, token in enumerate(tokens)}).save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokens), initializer_range=0.2, **shape)).save_pretrained(folder)
    return folder


def silent(*_: object) -> None:
    """Report no progress."""
