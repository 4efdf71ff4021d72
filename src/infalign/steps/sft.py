"""The stage sft: supervised fine-tuning of the policy, whose result is the reference policy."""

from collections.abc import Iterator
from functools import partial

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table
from infalign.data.examples import from_table
from infalign.models.pretrained import load_policy
from infalign.models.settings import PolicyModel
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.layout import Layout
from infalign.steps.run import TRAINED, Pass, Run
from infalign.training.output_folder import Target


def units(run: Run) -> Iterator[Unit]:
    """Yield the fine-tuning, unless the policy is used as it is."""
    policy, target = run.recipe.policy, run.target("reference")
    if policy.fit is not None:
        yield Unit(
            "sft",
            "sft",
            inputs=(run.layout.data,),
            settings=run.key("policy"),
            output=target.model,
            work=partial(fine_tune_policy, policy, run.layout, target),
            workspace=target.checkpoints,
            together=True,
            so_far=target.so_far,
            passes=[Pass(TRAINED * policy.fit.passes, run.networks("reference"), "demonstrations")],
        )


def fine_tune_policy(policy: PolicyModel, layout: Layout, target: Target, *, on_progress: OnProgress) -> Summary:
    """Fine-tune the policy on the demonstrations. Raises DataError if none fits."""
    from infalign.models.scratch import new_policy
    from infalign.training.supervised import demonstrations, fine_tune

    assert policy.fit is not None
    tokenizer = load_tokenizer(layout.tokenizer)
    examples = from_table(read_table(layout.data / "demonstrations.parquet"))
    if not examples:
        raise DataError("policy.fit needs demonstrations or pairs, but the data has only prompts; leave policy.fit out")
    if policy.scratch is not None:
        model = new_policy(policy.scratch, tokenizer, seed=target.seed)
    else:
        model, _ = load_policy(str(policy.model), device=target.compute.torch_device())
    demos = demonstrations(tokenizer, examples)
    rows = demos.select([place for place, length in enumerate(demos["length"][:]) if length <= policy.fit.max_length])
    if not rows:
        raise DataError(
            f"all {len(demos)} demonstrations exceed {policy.fit.max_length} tokens; raise policy.fit.max_length"
        )
    with target.job(on_progress) as job:
        history = fine_tune(model, tokenizer, rows, policy.fit, job)
    return {
        "rows": len(rows),
        "rows_too_long": len(demos) - len(rows),
        "rows_rendered_otherwise": len(rows) - sum(rows["is_rendered"][:]),
        "history": history,
        "loss": float([row["loss"] for row in history if "loss" in row][-1]),
    }
