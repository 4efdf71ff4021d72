"""The stage evaluate: fresh samples of every model, their scores and KL, and all numbers of the run."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.evaluation.kl import rao_blackwell_kl
from infalign.models.pretrained import load_policy
from infalign.progress import OnProgress, SoFar
from infalign.rewards.scores import scored_so_far
from infalign.rewards.sources import Scorer
from infalign.runs.calibrated import resolved
from infalign.runs.card import write_card
from infalign.runs.evaluated import Evaluated
from infalign.runs.layout import Summary
from infalign.runs.passes import Draw, Pass, Read, Texts
from infalign.runs.results import FORMAT, read_results, write_results
from infalign.runs.rollouts import cut_off
from infalign.runs.run import Run
from infalign.runs.stages import benchmarks
from infalign.runs.trackers import track
from infalign.runs.units import Unit
from infalign.sampling.prompts import PromptTable, Sampler, drawn_so_far, numbered
from infalign.sampling.rollouts import find_rollouts
from infalign.sequences import Lazy, token_lists_on_disk
from infalign.storage import write_table
from infalign.training.solvers.base import Solver

BATCH_TOKENS = 16384  # tokens per forward pass


def units(run: Run) -> Iterator[Unit]:
    """Yield the evaluation of the reference and of each policy, on test prompts and benchmarks, and all numbers."""
    evaluations = list(evaluations_on(run, "test"))
    asked = [*evaluations, *benchmarks.units(run)]
    yield from asked
    yield Unit(
        "evaluate",
        "results",
        inputs=tuple(unit.output for unit in asked),
        settings=run.key("evaluate", "procedure") | {"format": FORMAT},
        output=run.layout.results,
        work=partial(summarise, Evaluated.of(run.recipe, run.layout), run.recipe.policies, run.recipe.report_to),
    )
    for name in run.recipe.policies:
        yield Unit(
            "evaluate",
            f"card-{name}",
            inputs=(run.layout.results, run.layout.model(name)),
            settings=run.key("reward", "judge", "gold", "policy", "data"),
            output=run.layout.card(name),
            work=partial(write_card, run.recipe, run.layout, name),
        )


def evaluations_on(run: Run, split: str) -> Iterator[Unit]:
    """Yield the evaluation of the reference and of each policy on the prompts of a split.

    On training prompts (those with rollouts) only the reward scores: this shows how well the policy optimised it on the
    prompts it was trained on.
    """
    yield _evaluation(run, "reference", split, run.reference, run.reference_inputs)
    for name in run.recipe.policies:
        folder = run.layout.model(name)
        yield _evaluation(run, name, split, str(folder), (folder,))


def guest_evaluation(run: Run, name: str, model: str) -> Unit:
    """Return the evaluation of a policy that was trained elsewhere, the folder or hub id ``model``, as ``name``."""
    return _evaluation(run, name, "test", model, ())


def _evaluation(run: Run, name: str, split: str, model: str, inputs: tuple[Path, ...]) -> Unit:
    evaluate, test = run.recipe.evaluate, split == "test"
    first = evaluate.prompts if test else min(evaluate.prompts, run.recipe.rollout.prompts)
    prompts, sources = PromptTable(run.layout.prompts(split), first), [*run.recipe.rewards] if test else ["reward"]
    scorers = [run.scorer(source) for source in sources]
    folder = run.layout.evaluation(name, split)
    # Each model has its own random stream: common random numbers would make policy and base samples dependent.
    stream = f"{run.recipe.seed} {name}" if test else f"{run.recipe.seed} {name} {split}"
    seed = int.from_bytes(blake2b(stream.encode(), digest_size=4).digest(), "little")
    reference = None if name == "reference" else run.reference
    return Unit(
        "evaluate",
        f"evaluate-{name}" if test else f"evaluate-{name}.{split}",
        inputs=(*inputs, *run.reward_inputs(*sources)),
        settings=run.sampling_key | run.key(*sources),
        extent={"evaluate": {"prompts": evaluate.prompts, "samples": evaluate.samples}},
        output=folder,
        work=partial(evaluate_model, run.sampler(model), reference, prompts, evaluate.samples, scorers, folder, seed),
        so_far=partial(samples_so_far, prompts, evaluate.samples, sources, folder),
        passes=partial(evaluation_passes, run, name, first, split, sources),
    )


def summarise(
    evaluated: Evaluated, solvers: Mapping[str, Solver], report_to: Sequence[str], *, on_progress: OnProgress
) -> Summary:
    """Write the numbers of all models, send them to the trackers, and return the headline numbers."""
    found = {name: resolved(name, solvers, evaluated.layout) for name in solvers}
    headline = write_results(evaluated, found, on_progress=on_progress)
    track(report_to, read_results(evaluated.layout.root), evaluated.layout)
    return headline


def evaluate_model(
    sampler: Sampler,
    reference: str | None,
    table: PromptTable,
    samples: int,
    scorers: Sequence[Scorer],
    folder: Path,
    seed: int,
    *,
    on_progress: OnProgress,
) -> Summary:
    """Draw fresh samples of a model, score them, and measure the KL to ``reference`` unless that is None."""
    prompts = table.read()
    sampler.draw(prompts, samples, folder / "samples", seed=seed, on_progress=on_progress)
    rollouts = find_rollouts(folder / "samples", prompts.prompt_ids, samples)
    lengths = [pc.list_value_length(table["token_ids"]).to_numpy() for table in rollouts.tables(["token_ids"])]
    scores = numbered(prompts.prompt_ids, samples).append_column("length", pa.array(np.concatenate(lengths)))
    asked = Lazy(len(rollouts), lambda i: prompts.conversations[i // samples])
    for scorer in scorers:
        rewards = scorer.score(asked, rollouts.values("text"), folder / "scores" / scorer.name, on_progress)
        scores = scores.append_column(scorer.name, pa.array(rewards))
    summary: Summary = {"samples": len(rollouts), "cut_off": cut_off(rollouts)}
    if reference is not None:
        device = sampler.compute.torch_device()
        policy_model, tokenizer = load_policy(sampler.model, device=device)
        reference_model, _ = load_policy(reference, device=device)
        kl = rao_blackwell_kl(
            policy_model,
            reference_model,
            Lazy(len(rollouts), lambda i: prompts.token_ids[i // samples]),
            token_lists_on_disk((table["token_ids"] for table in rollouts.tables(["token_ids"])), folder),
            pad_id=tokenizer.pad_token_id,
            batch_tokens=BATCH_TOKENS,
        )
        scores = scores.append_column("kl", pa.array(kl.rao_blackwell))
        summary["kl"] = float(kl.rao_blackwell.mean())
    write_table(folder / "scores.parquet", scores)
    return summary


def evaluation_passes(
    run: Run, name: str, prompts: int, split: str, sources: Sequence[str], of: Texts
) -> Iterator[Pass]:
    """Yield the draws of a model, the passes of the rewards over them, and those that measure its KL."""
    count, samples = of.prompts(prompts, split), run.recipe.evaluate.samples
    own, rollout = run.networks(name), run.recipe.rollout
    for network in own:
        served = not rollout.engine.own_models
        yield Draw(network, count, samples, of.prompt, of.drawn, rollout.max_new_tokens, served)
    read = [run.architecture(source) for source in sources if run.recipe.rewards[source].is_classifier]
    if name != "reference":
        read += [*own, run.architecture("policy")]
    for network in read:
        yield Read(network, count, samples, of.prompt, of.drawn)


def samples_so_far(table: PromptTable, samples: int, sources: Sequence[str], folder: Path) -> SoFar:
    """Return how many evaluation samples of a model exist, and how many of them each source has scored."""
    prompts = table.read()
    drawn = drawn_so_far(prompts, samples, folder / "samples")
    every = len(prompts.prompt_ids) * samples
    scored = {source: scored_so_far(every, folder / "scores" / source) for source in sources}
    words = [f"{found.said} by {source}" for source, found in scored.items() if found.said]
    shares = [drawn.share, *(found.share for found in scored.values())]
    return SoFar(", ".join(filter(None, [drawn.said, *words])), sum(shares) / len(shares))
