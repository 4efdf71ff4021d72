"""The stage evaluate: fresh samples of every model, their scores and KL, and all numbers of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.core.progress import OnProgress
from infalign.core.sequences import Lazy, token_lists_on_disk
from infalign.core.storage import read_table, write_table
from infalign.evaluation.kl import rao_blackwell_kl
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.pipeline.units import Summary, Unit
from infalign.policies.evaluate import KL_SAMPLES, stream_seed
from infalign.report.card import write_card
from infalign.report.results import FORMAT, read_results, write_results
from infalign.report.scored_samples import ScoredSamples
from infalign.report.trackers import track
from infalign.rewards.sources import Scorer
from infalign.sampling.prompts import PromptTable, rollout_keys
from infalign.steps.run import DRAWN, READ, Pass, Run
from infalign.steps.samples import StoredSamples, cut_off, draw_samples, drawn_so_far, scored_so_far
from infalign.training.solvers.base import Solver


def units(run: Run) -> Iterator[Unit]:
    """Yield the evaluation of the reference and of each policy on the test prompts, and all numbers."""
    asked = [*evaluation(run, "reference", run.reference, run.reference_inputs)]
    for name in run.recipe.policies:
        folder = run.layout.model(name)
        asked += evaluation(run, name, str(folder), (folder,))
    yield from asked
    yield Unit(
        "evaluate",
        "results",
        inputs=tuple(unit.output for unit in asked),
        settings=run.key("evaluate", "procedure") | {"format": FORMAT},
        output=run.layout.results,
        work=partial(summarize, ScoredSamples(run.recipe, run.layout), run.recipe.policies, run.recipe.report_to),
    )
    for name in run.recipe.policies:
        yield Unit(
            "evaluate",
            "card",
            name,
            inputs=(run.layout.results, run.layout.model(name)),
            settings=run.key("reward", "judge", "gold", "policy", "data"),
            output=run.layout.card(name),
            work=partial(write_card, run.recipe, run.layout, name),
        )


def evaluation(run: Run, name: str, model: str, inputs: tuple[Path, ...]) -> Iterator[Unit]:
    """Yield the samples of a model, their KL unless it is the reference, and their scores, which may change alone."""
    evaluate, sources, networks = run.recipe.evaluate, [*run.recipe.rewards], run.networks(name)
    prompts, folder = PromptTable(run.layout.prompts("test"), evaluate.prompts), run.layout.evaluation(name)
    samples, scores = folder / "samples", folder / "scores"
    kl = None if name == "reference" else folder / "kl.parquet"
    base = run.layout.evaluation("reference")
    extent = {"evaluate": {"prompts": evaluate.prompts, "samples": evaluate.samples}}
    seed = stream_seed(run.recipe.seed, name)
    drawn = StoredSamples(prompts, evaluate.samples, samples)
    measured = replace(drawn, each=min(KL_SAMPLES, evaluate.samples))
    yield Unit(
        "evaluate",
        "samples",
        name,
        inputs=inputs,
        settings=run.sampling_key(name),
        extent=extent,
        output=samples,
        work=partial(draw_samples, run.sampler(name, model), drawn, seed),
        workspace=scores,  # scores of other samples
        so_far=partial(drawn_so_far, drawn),
        passes=[Pass.over(DRAWN, networks, prompts, evaluate.samples)],
    )
    if kl is not None:
        with_reference = networks if len(networks) > 1 else networks * 2  # a guide shares the reference's pass
        yield Unit(
            "evaluate",
            "kl",
            name,
            inputs=(samples, *inputs, *run.reference_inputs),
            settings=run.key("policy") | run.precision,
            extent={"evaluate": {"prompts": evaluate.prompts, "samples": measured.each}},
            output=kl,
            work=partial(measure_kl, model, run.reference, run.recipe.compute, measured, kl),
            passes=[Pass.over(READ, with_reference, prompts, measured.each)],
        )
    yield Unit(
        "evaluate",
        "evaluate",
        name,
        inputs=(samples, *([] if kl is None else [kl, base / "scores.parquet"]), *run.reward_inputs(*sources)),
        settings=run.key(*sources) | run.precision,
        extent=extent,
        output=folder / "scores.parquet",
        work=partial(score_samples, drawn, [run.scorer(source) for source in sources], scores, base / "scores", kl),
        so_far=partial(scored_so_far, drawn, [scores / source for source in sources]),
        clears=True,  # scores of a source that is as before are kept
        passes=[Pass.over(READ, run.scoring_networks(*sources), prompts, evaluate.samples)],
    )


def summarize(
    evaluated: ScoredSamples, solvers: Mapping[str, Solver], report_to: Sequence[str], *, on_progress: OnProgress
) -> Summary:
    """Write the numbers of all models, send them to the trackers, and return the headline numbers."""
    headline = write_results(evaluated, solvers, on_progress=on_progress)
    track(report_to, read_results(evaluated.layout.root), evaluated.layout)
    return headline


def measure_kl(
    model: str, reference: str, compute: Compute, samples: StoredSamples, path: Path, *, on_progress: OnProgress
) -> Summary:
    """Write the KL of a model to the reference, by each of its samples."""
    (prompts, drawn), device = samples.read(), compute.torch_device()
    policy, _ = load_policy(model, device=device, dtype=compute.dtype)
    base, _ = load_policy(reference, device=device, dtype=compute.dtype)
    kl = rao_blackwell_kl(
        policy,
        base,
        Lazy(len(drawn), lambda i: prompts.token_ids[i // samples.each]),
        token_lists_on_disk((table["token_ids"] for table in drawn.tables(["token_ids"])), path.parent),
        on_progress=lambda done, total: on_progress(done, total, "responses"),
    )
    write_table(path, rollout_keys(prompts.prompt_ids, samples.each).append_column("kl", pa.array(kl)))
    return {"responses": len(drawn)}


def score_samples(
    samples: StoredSamples,
    scorers: Sequence[Scorer],
    folder: Path,
    known: Path,
    kl: Path | None,
    *,
    on_progress: OnProgress,
) -> Summary:
    """Write the scores of all samples beside their lengths, and their KL unless they are the reference's.

    Responses that the reference gave too have its scores, in ``known``.
    """
    prompts, drawn = samples.read()
    lengths = [pc.list_value_length(table["token_ids"]).to_numpy() for table in drawn.tables(["token_ids"])]
    scores = rollout_keys(prompts.prompt_ids, samples.each).append_column("length", pa.array(np.concatenate(lengths)))
    rows = samples.rows(prompts, drawn)
    left_out, means = np.zeros(len(prompts.prompt_ids), bool), dict[str, float]()
    for scorer in scorers:
        rewards = scorer.score(rows, folder / scorer.name, on_progress, known / scorer.name)
        scores = scores.append_column(scorer.name, pa.array(rewards, from_pandas=True))  # NaN is null
        left_out |= np.isnan(rewards.reshape(left_out.size, -1)).any(axis=1)
        means[f"mean_{scorer.name}"] = float(np.nanmean(rewards))
    summary: Summary = {"samples": len(drawn), **means, "cut_off": cut_off(drawn), "left_out": int(left_out.sum())}
    if kl is not None:
        some_PM = read_table(kl, ["kl"])["kl"].to_numpy().reshape(len(prompts.prompt_ids), -1)
        every_PM = np.pad(some_PM, ((0, 0), (0, samples.each - some_PM.shape[1])), constant_values=np.nan)
        scores = scores.append_column("kl", pa.array(every_PM.ravel(), from_pandas=True))  # NaN is null
        summary["kl"] = float(some_PM.mean())
    write_table(folder.with_suffix(".parquet"), scores)
    return summary
