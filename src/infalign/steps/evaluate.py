"""The stage evaluate: fresh samples of every model, their scores and KL, and all numbers of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.core.progress import OnProgress, SoFar
from infalign.core.sequences import Lazy, token_lists_on_disk
from infalign.core.storage import read_table, write_table
from infalign.evaluation.kl import rao_blackwell_kl
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.data_dependent import resolved_policy
from infalign.report.card import write_card
from infalign.report.results import FORMAT, read_results, write_results
from infalign.report.scored_samples import ScoredSamples
from infalign.report.trackers import track
from infalign.rewards.scores import count_scored
from infalign.rewards.sources import Scorer, load_rewards
from infalign.sampling.prompts import Prompts, PromptTable, Sampler, rollout_keys, rollout_progress
from infalign.sampling.rollouts import Drawn, find_rollouts
from infalign.steps import likelihood
from infalign.steps.costs import Cost, Counts
from infalign.steps.run import Run
from infalign.steps.stored_rollouts import cut_off
from infalign.training.solvers.base import Solver
from infalign.training.solvers.offline import Offline

BATCH_TOKENS = 16384  # tokens per forward pass
KL_SAMPLES = 8  # of a prompt, at most: prompts differ so much that four times as many hardly narrow the interval


def units(run: Run) -> Iterator[Unit]:
    """Yield the evaluation of the reference and of each policy, and all numbers."""
    asked = [*evaluations(run), *likelihood.units(run)]
    yield from asked
    yield Unit(
        "evaluate",
        "results",
        inputs=tuple(unit.output for unit in asked),
        settings=run.key("evaluate", "procedure") | {"format": FORMAT},
        output=run.layout.results,
        work=partial(summarize, ScoredSamples.of(run.recipe, run.layout), run.recipe.policies, run.recipe.report_to),
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


def evaluations(run: Run) -> Iterator[Unit]:
    """Yield the evaluation of the reference and of each policy on the test prompts."""
    yield from _evaluation(run, "reference", run.reference, run.reference_inputs)
    for name in run.recipe.policies:
        folder = run.layout.model(name)
        yield from _evaluation(run, name, str(folder), (folder,))


def external_evaluation(run: Run, name: str, model: str) -> list[Unit]:
    """Return the evaluation of a policy that was trained elsewhere, the folder or hub id ``model``, as ``name``."""
    return [*_evaluation(run, name, model, ())]


def _evaluation(run: Run, name: str, model: str, inputs: tuple[Path, ...]) -> Iterator[Unit]:
    """Yield the samples of a model, their KL unless it is the reference, and their scores, which may change alone."""
    evaluate, sources = run.recipe.evaluate, [*run.recipe.rewards]
    prompts, folder = PromptTable(run.layout.prompts("test"), evaluate.prompts), run.layout.evaluation(name)
    samples, scores = folder / "samples", folder / "scores"
    kl = None if name == "reference" else folder / "kl.parquet"
    extent = {"evaluate": {"prompts": evaluate.prompts, "samples": evaluate.samples}}
    # Each model has its own random stream: common random numbers would make policy and base samples dependent.
    seed = int.from_bytes(blake2b(f"{run.recipe.seed} {name}".encode(), digest_size=4).digest(), "little")
    drawn = FreshSamples(prompts, evaluate.samples, samples)
    measured = replace(drawn, each=min(KL_SAMPLES, evaluate.samples))
    yield Unit(
        "evaluate",
        "samples",
        name,
        inputs=inputs,
        settings=run.sampling_key,
        extent=extent,
        output=samples,
        work=partial(draw_samples, run.sampler(model), drawn, seed),
        workspace=scores,  # scores of other samples
        so_far=partial(drawn_so_far_of, drawn),
        cost=partial(draw_cost, run, name),
    )
    if kl is not None:
        yield Unit(
            "evaluate",
            "kl",
            name,
            inputs=(samples, *inputs, *run.reference_inputs),
            settings=run.key("policy") | run.precision,
            extent={"evaluate": {"prompts": evaluate.prompts, "samples": measured.each}},
            output=kl,
            work=partial(measure_kl, model, run.reference, run.recipe.compute, measured, kl),
            cost=partial(kl_cost, run, name),
        )
    yield Unit(
        "evaluate",
        "evaluate",
        name,
        inputs=(samples, *([] if kl is None else [kl]), *run.reward_inputs(*sources)),
        settings=run.key(*sources) | run.precision,
        extent=extent,
        output=folder / "scores.parquet",
        work=partial(score_samples, drawn, [run.scorer(source) for source in sources], scores, kl),
        so_far=partial(count_scored_samples, drawn, sources, scores),
        clears=True,  # scores of a source that is as before are kept
        cost=partial(score_cost, run, sources),
    )


def summarize(
    evaluated: ScoredSamples, solvers: Mapping[str, Solver], report_to: Sequence[str], *, on_progress: OnProgress
) -> Summary:
    """Write the numbers of all models, send them to the trackers, and return the headline numbers."""
    found = {name: resolved_policy(name, solvers, evaluated.layout) for name in solvers}
    headline = write_results(evaluated, found, on_progress=on_progress)
    track(report_to, read_results(evaluated.layout.root), evaluated.layout)
    return headline


@dataclass(frozen=True, slots=True)
class FreshSamples:
    """Fresh samples of a model: as many for each prompt, in a folder."""

    table: PromptTable
    each: int
    folder: Path

    def prompts(self) -> Prompts:
        """Return the prompts."""
        return self.table.read()

    def drawn(self, prompts: Prompts) -> Drawn:
        """Return the samples of ``prompts``."""
        return find_rollouts(self.folder, prompts.prompt_ids, self.each)


def draw_samples(sampler: Sampler, samples: FreshSamples, seed: int, *, on_progress: OnProgress) -> Summary:
    """Draw fresh samples of a model."""
    prompts = samples.prompts()
    sampler.draw(prompts, samples.each, samples.folder, seed=seed, on_progress=on_progress)
    return {"responses": len(samples.drawn(prompts))}


def measure_kl(
    model: str, reference: str, compute: Compute, samples: FreshSamples, path: Path, *, on_progress: OnProgress
) -> Summary:
    """Write the KL of a model to the reference, by each of its samples."""
    prompts, device = samples.prompts(), compute.torch_device()
    drawn = samples.drawn(prompts)
    policy, _ = load_policy(model, device=device, dtype=compute.dtype)
    base, _ = load_policy(reference, device=device, dtype=compute.dtype)
    kl = rao_blackwell_kl(
        policy,
        base,
        Lazy(len(drawn), lambda i: prompts.token_ids[i // samples.each]),
        token_lists_on_disk((table["token_ids"] for table in drawn.tables(["token_ids"])), path.parent),
        batch_tokens=BATCH_TOKENS,
        on_progress=lambda done, total: on_progress(done, total, "responses"),
    )
    write_table(path, rollout_keys(prompts.prompt_ids, samples.each).append_column("kl", pa.array(kl.rao_blackwell)))
    return {"responses": len(drawn)}


def score_samples(
    samples: FreshSamples, scorers: Sequence[Scorer], folder: Path, kl: Path | None, *, on_progress: OnProgress
) -> Summary:
    """Write the scores of all samples beside their lengths, and their KL unless they are the reference's."""
    prompts = samples.prompts()
    drawn = samples.drawn(prompts)
    lengths = [pc.list_value_length(table["token_ids"]).to_numpy() for table in drawn.tables(["token_ids"])]
    scores = rollout_keys(prompts.prompt_ids, samples.each).append_column("length", pa.array(np.concatenate(lengths)))
    asked = Lazy(len(drawn), lambda i: prompts.conversations[i // samples.each])
    for scorer, reward in load_rewards(scorers):
        rewards = scorer.score(asked, drawn.values("text"), folder / scorer.name, on_progress, reward)
        scores = scores.append_column(scorer.name, pa.array(rewards))
    summary: Summary = {"samples": len(drawn), "cut_off": cut_off(drawn)}
    if kl is not None:
        some_PM = read_table(kl, ["kl"])["kl"].to_numpy().reshape(len(prompts.prompt_ids), -1)
        every_PM = np.pad(some_PM, ((0, 0), (0, samples.each - some_PM.shape[1])), constant_values=np.nan)
        scores = scores.append_column("kl", pa.array(every_PM.ravel(), from_pandas=True))  # NaN is null
        summary["kl"] = float(some_PM.mean())
    write_table(folder.with_suffix(".parquet"), scores)
    return summary


def draw_cost(run: Run, name: str, counts: Counts) -> Cost:
    """Return the cost of a model's samples."""
    parameters, prompts = counts.parameters(run.networks(name)), counts.prompts(run.recipe.evaluate.prompts, "test")
    return counts.drawing(parameters, prompts, run.recipe.evaluate.samples, run.recipe.rollout.max_new_tokens)


def kl_cost(run: Run, name: str, counts: Counts) -> Cost:
    """Return the cost of the passes of a policy and of the reference over its samples; a guide shares the latter."""
    policy, networks = run.recipe.policies.get(name), run.networks(name)
    if not isinstance(policy, Offline) or policy.guide is None:
        networks = [*networks, run.architecture("policy")]
    prompts = counts.prompts(run.recipe.evaluate.prompts, "test")
    return counts.reading(counts.parameters(networks), prompts, min(KL_SAMPLES, run.recipe.evaluate.samples))


def score_cost(run: Run, sources: Sequence[str], counts: Counts) -> Cost:
    """Return the cost of the rewards that are models of the run; heads on one model share its pass."""
    rewards, prompts = run.recipe.rewards, counts.prompts(run.recipe.evaluate.prompts, "test")
    alone = [
        source
        for place, source in enumerate(sources)
        if rewards[source].is_classifier
        and not any(rewards[other].shares_passes_with(rewards[source]) for other in sources[:place])
    ]
    parameters = counts.parameters(map(run.architecture, alone))
    return counts.reading(parameters, prompts, run.recipe.evaluate.samples)


def drawn_so_far_of(samples: FreshSamples) -> SoFar:
    """Return how many of the samples are drawn."""
    return rollout_progress(samples.prompts(), samples.each, samples.folder)


def count_scored_samples(samples: FreshSamples, sources: Sequence[str], folder: Path) -> SoFar:
    """Return how many of the samples each source has scored."""
    every = len(samples.prompts().prompt_ids) * samples.each
    scored = {source: count_scored(every, folder / source) for source in sources}
    words = [f"{found.said} by {source}" for source, found in scored.items() if found.said]
    return SoFar(", ".join(words), sum(found.share for found in scored.values()) / len(sources))
