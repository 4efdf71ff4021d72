"""What else alignment changed: the reference and each policy on the tasks of ``benchmarks``."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from infalign.core.progress import OnProgress
from infalign.core.storage import read_table, write_table
from infalign.evaluation.benchmarks import by_metric, harness, held_out
from infalign.evaluation.settings import HELD_OUT, task_label
from infalign.models.pretrained import load_policy, load_tokenizer
from infalign.models.settings import Compute, Fit
from infalign.runs.layout import Layout, Summary
from infalign.runs.passes import Pass, Read, Texts
from infalign.runs.run import Confidence, Run, confidence
from infalign.runs.units import Unit, no_passes


def units(run: Run) -> Iterator[Unit]:
    """Yield each task for the reference and for each policy; none where the recipe has no ``benchmarks``."""
    recipe, layout = run.recipe, run.layout
    benchmarks = recipe.benchmarks
    if benchmarks is None:
        return
    models = {"reference": (run.reference, run.reference_inputs)}
    models |= {name: (str(layout.model(name)), (layout.data, layout.model(name))) for name in recipe.policies}
    asked = run.contents["benchmarks"]
    for task in benchmarks.tasks:
        label = task_label(task)
        for name, (model, inputs) in models.items():
            output = layout.benchmark(name, label)
            yield Unit(
                "evaluate",
                f"benchmark-{name}.{label}",
                inputs=inputs,
                settings=run.key("policy") | {"benchmarks": asked | {"tasks": asked["tasks"][label]}},
                output=output,
                passes=partial(held_out_passes, run, name) if task == HELD_OUT else no_passes,
                work=partial(
                    ask,
                    model,
                    task,
                    layout,
                    output,
                    documents=benchmarks.documents,
                    chat=benchmarks.chat,
                    compute=recipe.compute,
                    intervals=confidence(recipe.evaluate, recipe.seed),
                ),
            )


def held_out_passes(run: Run, name: str, texts: Texts) -> Iterator[Pass]:
    """Yield the passes, in float32, that tell the likelihood of responses."""
    assert run.recipe.benchmarks is not None
    rows = min(run.recipe.benchmarks.documents or math.inf, texts.count("test_pairs"))
    for network in run.networks(name):
        yield Read(network, rows, 1, texts.prompt, texts.response, vocabulary=True, fit=Fit())


def ask(
    model: str,
    task: str,
    layout: Layout,
    output: Path,
    *,
    documents: int | None,
    chat: bool,
    compute: Compute,
    intervals: Confidence,
    on_progress: OnProgress,
) -> Summary:
    """Write what a model achieves on each document of a task, and return the means."""
    policy, _ = load_policy(model, device=compute.torch_device())
    tokenizer = load_tokenizer(layout.tokenizer)
    if task == HELD_OUT:
        table = held_out(policy, tokenizer, read_table(layout.data / "test_pairs.parquet"), documents)
    else:
        table = harness(policy, tokenizer, task, documents, chat=chat)
    write_table(output, table)
    return {f"{task} {metric}": intervals.of(found.values) for (task, metric), found in by_metric(table).items()}
