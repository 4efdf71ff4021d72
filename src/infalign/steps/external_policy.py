"""The evaluation of a policy that was trained anywhere, under a run's procedure, prompts, reference and judges."""

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from infalign.core.display import amount, heading, plain_table, say, share
from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.models.pretrained import config_of, model_digest
from infalign.models.settings import is_hub_id
from infalign.models.tokenizers import check_same_tokens, load_tokenizer
from infalign.pipeline.pending import pending
from infalign.recipe.settings import Recipe
from infalign.report.results import Results, pass_at_k, sample_numbers
from infalign.report.scored_samples import ScoredSamples
from infalign.report.tables import print_pass_at_k
from infalign.steps.evaluate import evaluation
from infalign.steps.run import Run
from infalign.steps.whole_run import do_units, open_run, units


def evaluate_external_policy(recipe: Recipe, model: str, *, console: Console) -> dict[str, Any]:
    """Return the KL, the win rates and the other numbers of the policy ``model``, a folder or a hub id.

    Its samples and scores are kept in the run directory, in evaluation/NAME.DIGEST with ``results.json``, so that the
    same command continues. Raises ConfigError for a run whose reference is not evaluated yet, and for a model that has
    another tokenizer or vocabulary than the reference.
    """
    if not Path(model).is_dir() and not is_hub_id(model):
        raise ConfigError(f"--policy {model}: the folder does not exist")
    with open_run(recipe) as run:
        wanted = units(run, until="evaluate")
        left = pending(wanted, run.layout.root)
        if "evaluate-reference" in left:
            raise ConfigError(
                f"the reference of {run.layout.root}, to which the policy is compared, is not evaluated yet; run "
                "`infalign run RECIPE --until evaluate` first"
            )
        digest = blake2b(model_digest(model).encode(), digest_size=4).hexdigest()
        check_fits(model, run)
        # No policy of the run has a dot in its name.
        name = f"{re.sub('[^A-Za-z0-9_-]', '_', Path(model).resolve().name)}.{digest}"
        done = [unit for unit in wanted if unit.name not in left]
        do_units(run, [*done, *evaluation(run, name, model, ())], until="evaluate", console=console)
        evaluated = ScoredSamples(run.recipe, run.layout)
        numbers = sample_numbers(evaluated, name, evaluated.wins(name, evaluated.procedures()))
        results = {"model": model, "procedure": evaluated.procedure.name, **numbers}
        known = {one: policy for one, policy in recipe.policies.items() if f"evaluate-{one}" not in left}
        results |= pass_at_k(
            evaluated, [*known, name], lambda one, kl: evaluated.curve_at(known[one], kl) if one in known else None
        )
        results["policies"] = {one: {"kl": evaluated.intervals.of(evaluated.kl(one))} for one in (*known, name)}
        write_text(run.layout.evaluation(name) / "results.json", json.dumps(results, indent=1))
    return results


def check_fits(model: str, run: Run) -> None:
    """Raise ConfigError that names what of ``model`` differs from the reference: tokenizer, EOS or vocabulary."""
    from infalign.models import guided  # noqa: F401 - so that transformers knows it

    sizes = [config_of(path).get_text_config().vocab_size for path in (model, run.reference)]
    ours, theirs = load_tokenizer(run.layout.tokenizer), load_tokenizer(model)
    check_same_tokens(theirs, ours, model)
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{model} has a vocabulary of {sizes[0]:,} tokens, the reference of {sizes[1]:,}; a KL needs equal "
            "ones: resize its embeddings (resize_token_embeddings)"
        )


def print_external_policy(found: dict[str, Any], console: Console) -> None:
    """Print for each procedure the win rate by each judge, pass@k and the KL, with intervals."""
    heading(console, f"{found['model']} against the reference: win rates in % by judge")
    rates = found["win_rates"]
    table = plain_table("served", *rates)
    for procedure in dict.fromkeys([found["procedure"], *rates["reward"]]):
        table.add_row(procedure, *(share(of_judge[procedure]) for of_judge in rates.values()))
    console.print(table)
    if "pass_at_k" in found:
        print_pass_at_k(cast(Results, found), console)
    say(console, f"KL to the reference: {amount(found['kl'])} nats per response")
