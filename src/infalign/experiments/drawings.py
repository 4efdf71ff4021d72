"""Figures of a reproduction, each with its caption and its numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from infalign.core.display import INK, QUIET, panels
from infalign.evaluation.intervals import Estimate, estimate
from infalign.evaluation.matched import FAR, LEAST_KL
from infalign.evaluation.seeds import Trained, over_seeds
from infalign.experiments.comparison_tables import draw_line
from infalign.experiments.hacking import MODELS, PHRASES, TESTS, Experiment, right_or_wrong
from infalign.experiments.hacking_figure import draw_accuracies
from infalign.experiments.methods import method_of
from infalign.experiments.seeds import Quantity, Seed, WinRate
from infalign.method.calibration import calibrate
from infalign.method.procedures import rewinds
from infalign.recipe.resolved import reference_rewards
from infalign.report.pictures import reward_by_rank
from infalign.theory.curve import Point, parse_aim, sweep
from infalign.theory.figures import ANALYTIC_COLUMNS, draw_analytic, plot_line

ENDS = ("mean", "low", "high")
TABLED = 100  # prompts in the table of ranks, which is embedded in the page


@dataclass(frozen=True)
class Drawn:
    """A figure, drawn in a style that is set, its caption and alternative text, and its numbers as a table."""

    figure: Any  # matplotlib.figure.Figure
    caption: str
    alt: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def drawn_analytic(points: Sequence[Point]) -> Drawn:
    """Draw theory's curves."""
    best = [point for point in points if point.transform == "optimal"]
    return Drawn(
        draw_analytic(points),
        "Theory: a policy that is free for every prompt. Dashed: the optimum for the procedure.",
        f"Win rate against KL for {len({point.procedure for point in points})} procedures; the optima end at "
        + ", ".join(f"{100 * point.win_rate:.1f} per cent ({point.procedure})" for point in best[-1:]),
        ANALYTIC_COLUMNS,
        [[getattr(point, column) for column in ANALYTIC_COLUMNS] for point in points],
    )


def drawn_ranks(seeds: Sequence[Seed]) -> Drawn:
    """Draw rank against raw reward for ten training prompts of the first seed; the table has its first `TABLED`."""
    rewards_PK = reference_rewards(seeds[0].layout)
    picture = reward_by_rank(rewards_PK)
    rows = [
        [prompt, reward, rank]
        for prompt, rewards in enumerate(rewards_PK[:TABLED])
        for reward, rank in zip(rewards, calibrate(rewards, rewards), strict=True)
    ]
    caption = f"{picture.caption} Seed {seeds[0].recipe.seed}; the table has the first {TABLED} training prompts."
    return Drawn(picture.figure, caption, picture.alt, ("prompt", "raw_reward", "calibrated_reward"), rows)


def drawn_hacking(seeds: Sequence[Seed]) -> Drawn:
    """Draw how many test pairs each reward model decides rightly, over seeds."""
    confidence = seeds[0].recipe.evaluate.confidence
    decided = [right_or_wrong(experiment_of(seed)) for seed in seeds]

    def estimated(name: str, test: str, of: Callable[[Any], Any]) -> dict[str, float]:
        trained = [Trained(ids, of(right[name][test])) for ids, right in decided]
        return over_seeds(trained, confidence=confidence).as_dict()

    models = {
        name: {
            "accuracy": {test: estimated(name, test, np.asarray) for test in TESTS},
            "ties": {test: estimated(name, test, lambda values: values == 0.5) for test in TESTS},
        }
        for name in MODELS
    }
    rows = [
        [test, name, *(models[name][what][test][end] for what in ("accuracy", "ties") for end in ENDS)]
        for test in TESTS
        for name in MODELS
    ]
    shown = ", ".join(f"{name} {100 * models[name]['accuracy']['inverted']['mean']:.0f}" for name in MODELS)
    return Drawn(
        draw_accuracies(models),
        f"Test pairs decided rightly; ties, which count half, are hatched. {_over(seeds)}",
        f"Bars of accuracy for three tests. Inverted test, per cent right: {shown}.",
        ("test", "model", *(f"{what}_{end}" for what in ("right", "tied") for end in ENDS)),
        rows,
    )


def experiment_of(seed: Seed) -> Experiment:
    """Return the poisoning of a seed's preferences with the paper's phrases."""
    return Experiment(seed.recipe, seed.layout.root, PHRASES, 1.0)


def drawn_by_kl(seeds: Sequence[Seed], methods: Sequence[str], quantities: Sequence[Quantity]) -> Drawn:
    """Draw quantities against KL, a panel each: a method's mean over seeds at each budget, and faint every policy.

    Win rates by the reward have theory's curves of identity and optimum. The axis ends at four times the median
    KL of those that have learnt.
    """
    trained = [method for method in methods if all(method in seed.trained_methods for seed in seeds)]
    marks = {quantity.label: list(_marks(seeds, trained, quantity)) for quantity in quantities}
    shown = [mark for own in marks.values() for mark in own]
    end = FAR * float(np.median([kl for mark in shown if (kl := mark.kl.mean) >= LEAST_KL] or [LEAST_KL]))
    most = 1.06 * max([LEAST_KL, *(mark.kl.high for mark in shown if mark.kl.mean <= end)])
    columns = min(len(quantities), 2)
    down = -(-len(quantities) // columns)
    figure, grid = panels(down, columns, (1.2 + 3.5 * columns, 0.9 + 2.9 * down))
    for axes, quantity in zip_longest(np.ravel(grid), quantities):
        if quantity is None:
            axes.set_axis_off()
            continue
        if isinstance(quantity, WinRate) and quantity.judge == "reward" and not rewinds(quantity.procedure):
            for aim, colour in {"identity": QUIET, "optimal": INK}.items():
                plot_line(axes, sweep(quantity.procedure, parse_aim(aim))[0], colour, label=f"theory, {aim}")
                axes.lines[-1].set(linestyle="--", linewidth=1)
        for method in trained:
            own = [mark for mark in marks[quantity.label] if mark.method == method]
            for mark in own:
                if mark.seed is not None and mark.kl.mean <= most:
                    colour = method_of(method).colour
                    axes.plot(
                        mark.kl.mean, quantity.scale * mark.value.mean, ".", color=colour, alpha=0.4, markersize=3
                    )
            over = sorted((mark for mark in own if mark.seed is None), key=lambda mark: mark.kl.mean)
            both = [mark.kl.as_dict() for mark in over], [mark.value.as_dict() for mark in over]
            draw_line(axes, method, *both, most=most, methods=trained, scale=quantity.scale)
        axes.set(xlabel="KL to the reference, nats", ylabel=quantity.label, xlim=(0, most))
        if isinstance(quantity, WinRate):  # an interval over two seeds may reach beyond
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 0.0), min(high, 100.0))
    figure.legend(*np.ravel(grid)[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    said = "; ".join(
        f"{mark.policy} {quantity.scale * mark.value.mean:.3g} at {mark.kl.mean:.2g} nats"
        for quantity in quantities[:1]
        for mark in marks[quantity.label]
        if mark.seed is None
    )
    ends = [f"{what}_{end}" for what in ("kl", "value") for end in ENDS]
    return Drawn(
        figure,
        f"Filled: ours. Dots: single trainings. {_over(seeds)}",
        f"{quantities[0].label} against KL: {said}.",
        ("quantity", "method", "policy", "seed", *ends),
        [[label, *mark.cells()] for label, own in marks.items() for mark in own],
    )


@dataclass(frozen=True)
class Mark:
    """A policy's KL and value: of one seed, with intervals over prompts, or over all seeds."""

    method: str
    policy: str
    seed: int | None
    kl: Estimate
    value: Estimate

    def cells(self) -> list[object]:
        """Return its row of the table."""
        numbers = [getattr(e, end) for e in (self.kl, self.value) for end in ENDS]
        return [self.method, self.policy, "all" if self.seed is None else self.seed, *numbers]


def _marks(seeds: Sequence[Seed], methods: Sequence[str], quantity: Quantity) -> Iterator[Mark]:
    confidence = seeds[0].recipe.evaluate.confidence
    for method in methods:
        for seed in seeds:
            for name in seed.policies_of(method):
                both = (estimate(v, confidence=confidence) for v in (seed.kl(name), seed.values(quantity, name)))
                yield Mark(method, name, seed.recipe.seed, *both)
        for name in seeds[0].policies_of(method):
            if all(name in seed.policies_of(method) for seed in seeds):
                kls = [seed.trained(seed.kl(name)) for seed in seeds]
                values = [seed.trained(seed.values(quantity, name)) for seed in seeds]
                yield Mark(method, name, None, *(over_seeds(v, confidence=confidence) for v in (kls, values)))


def _over(seeds: Sequence[Seed]) -> str:
    return f"Bars: {seeds[0].recipe.evaluate.confidence:.0%} intervals over {len(seeds)} seeds and their test prompts."
