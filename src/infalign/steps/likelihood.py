"""How likely the preferred responses of test pairs are to the reference and to each policy; of the stage evaluate."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table, write_table
from infalign.data.examples import Example, from_table
from infalign.method.calibration import Array
from infalign.models.conversations import training_ids
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.layout import Layout
from infalign.steps.costs import Cost, Counts, reading_rows
from infalign.steps.run import Run

BATCH_TOKENS = 16384  # tokens per forward pass


def units(run: Run) -> Iterator[Unit]:
    """Yield the likelihood by the reference and by each policy; none unless the recipe asks for it."""
    recipe, layout = run.recipe, run.layout
    if not recipe.evaluate.held_out_likelihood:
        return
    models = {"reference": (run.reference, run.reference_inputs)}
    models |= {name: (str(layout.model(name)), (layout.data, layout.model(name))) for name in recipe.policies}
    for name, (model, inputs) in models.items():
        output = layout.held_out_likelihood(name)
        yield Unit(
            "evaluate",
            "likelihood",
            name,
            inputs=inputs,
            settings=run.key("policy") | {"evaluate": {"prompts": recipe.evaluate.prompts}},
            output=output,
            work=partial(measure_likelihood, model, layout, output, recipe.evaluate.prompts, recipe.compute),
            cost=partial(likelihood_cost, run, name),
        )


def likelihood_cost(run: Run, name: str, counts: Counts) -> Cost:
    """Return the cost of the passes over the test pairs."""
    return reading_rows(run.networks(name), min(run.recipe.evaluate.prompts, counts.count("test_pairs")), counts)


def measure_likelihood(
    model: str, layout: Layout, output: Path, pairs: int, compute: Compute, *, on_progress: OnProgress
) -> Summary:
    """Write log π per token of the preferred responses of the first ``pairs`` test pairs."""
    policy, _ = load_policy(model, device=compute.torch_device())
    examples = from_table(read_table(layout.data / "test_pairs.parquet").slice(0, pairs))
    found = preferred_logprobs(policy, load_tokenizer(layout.tokenizer), examples)
    write_table(output, pa.table({"logprob_per_token": found}))
    return {"responses": len(found)}


def preferred_logprobs(model: Any, tokenizer: Any, pairs: Sequence[Example]) -> Array:
    """Return log π per token, in nats, of each preferred response that fits the model's context, shape (R,).

    Raises DataError if fewer than two fit.
    """
    from infalign.models.logprobs import token_logprobs

    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    prompts, responses = list[list[int]](), list[list[int]]()
    tools = [e.columns.get("tools") for e in pairs]
    for row in training_ids(tokenizer, [e.prompt for e in pairs], [e.chosen for e in pairs], tools):
        start, end = row.mask.index(1), len(row.mask) - row.mask[::-1].index(1)
        if end <= context:
            prompts.append(row.ids[:start])
            responses.append(row.ids[start:end])
    if len(responses) < 2:
        raise DataError(
            f"{len(responses)} of {len(pairs)} preferred test responses fit the model's context of {context} "
            "tokens, and evaluate.held_out_likelihood needs 2; leave it out"
        )
    sums = token_logprobs(model, prompts, responses, batch_tokens=BATCH_TOKENS)
    return sums / list(map(len, responses))
