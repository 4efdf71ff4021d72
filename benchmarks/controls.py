"""Why a guide keeps more of theory's gap than a plain language model: controls in the world of preferences.

``python benchmarks/controls.py FOLDER [SEED …] [key=value …]``, by default seeds 0, 1, 2, in the folder of
`benchmarks/forms.py`, whose data, models and rollouts it takes or makes. exp:10 at that recipe's KL budget on the same
rows: guides on the trunk of the reward model and of the reference; the reference itself trained, at three learning
rates; and a reference with twice the layers, the new ones adding nothing at first, so that it has as many parameters
as reference and guide. Prints a row a control with the mean over seeds and its 95 % interval
(Student's t over seeds). What is done is not repeated. Some 15 minutes a seed on two cores.
"""

import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forms import base_run
from ruamel.yaml import YAML
from seeds import Seed, mean_over_seeds, read_words, share_of_gap
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from infalign import run

RATES = (2e-4, 4e-4, 1e-3)


def doubled(reference: Path, folder: Path) -> Path:
    """Save the reference with each layer followed by a new one that adds nothing to the residual stream yet."""
    torch.manual_seed(0)
    small, config = AutoModelForCausalLM.from_pretrained(reference), AutoConfig.from_pretrained(reference)
    config.num_hidden_layers *= 2
    large = AutoModelForCausalLM.from_config(config)
    of_small = small.state_dict()
    for place, layer in enumerate(small.model.layers):
        large.model.layers[2 * place].load_state_dict(layer.state_dict())
        added = large.model.layers[2 * place + 1]
        torch.nn.init.zeros_(added.self_attn.o_proj.weight)
        torch.nn.init.zeros_(added.mlp.down_proj.weight)
    large.load_state_dict({name: of_small[name] for name in of_small if ".layers." not in name}, strict=False)
    tokens = torch.arange(10, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(large(tokens).logits, small(tokens).logits)
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(reference).save_pretrained(folder)
    return folder


def policies(recipe: Path, guides: dict[str, str]) -> dict[str, Any]:
    """Return the settings of the aware policy with each guide, and of the reference itself at each learning rate."""
    aware = YAML(typ="safe").load(recipe)["policies"]["aware"]
    guided = {name: aware | {"guide": {"trunk": trunk}} for name, trunk in guides.items()}
    plain = {key: value for key, value in aware.items() if key != "guide"}
    rates = {f"plain-{rate:.0e}": plain | {"fit": aware["fit"] | {"learning_rate": rate}} for rate in RATES}
    return guided | rates


def rows_of(run_dir: Path, wanted: dict[str, Any], changes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Run `preferences` with other policies in a directory; return KL, win rates by each judge and share of each."""
    results = run("preferences", {"run_dir": str(run_dir), "policies": wanted, **changes})
    seed, rows = Seed.of_run(run_dir), {}
    for name in wanted:
        policy, share = results["policies"][name], share_of_gap(seed, name)
        wins = {judge: 100 * rates[results["procedure"]]["mean"] for judge, rates in policy["win_rates"].items()}
        rows[name] = {"KL": policy["kl"]["mean"], **wins, "share": np.nan if share is None else share.mean()}
    return rows


def of_seed(folder: Path, seed: str, overrides: list[str]) -> dict[str, dict[str, float]]:
    """Return the numbers of every control of one seed."""
    settings = [f"seed={seed}", *overrides]
    base = base_run("preferences", folder / f"seed-{seed}", settings)
    changes = {key: YAML(typ="safe").load(value) for key, _, value in (word.partition("=") for word in settings)}
    models, made = base / "models", base.parent / "controls"
    if not made.exists():
        shutil.copytree(base, made)
    recipe = base / "recipe.yaml"
    rows = rows_of(made, policies(recipe, {"guide-reward": "reward", "guide-reference": "reference"}), changes)
    deep = doubled(models / "reference", base.parent / "doubled")
    changes |= {"policy": {"model": str(deep)}} | {name: {"model": str(models / name)} for name in ("reward", "judge")}
    found = rows_of(base.parent / "controls-doubled", policies(recipe, {}), changes)
    return rows | {f"doubled, {name}": row for name, row in found.items()}


def main() -> None:
    """Do what is missing and print the table."""
    folder, *words = sys.argv[1:]
    seeds, overrides = read_words(words)
    rows = defaultdict(list)
    for seed in seeds:
        for name, found in of_seed(Path(folder), seed, overrides).items():
            rows[name].append(found)
    columns = list(next(iter(rows.values()))[0])
    print(f"\n| control | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for name, found in rows.items():
        print(
            f"| {name} | {' | '.join(mean_over_seeds([row[column] for row in found]) for column in columns)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
