"""The figures of the paper, each with its caption and its numbers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, zip_longest
from typing import Any

import numpy as np
from best_of_n import BEST_OF_N
from hacking import MODELS, TESTS, Hacking
from matplotlib import colormaps
from method_policies import MAX_KL_RATIO, MIN_KL
from methods import read_method
from plots import COLORS, INK, MARKERS, PAPER, QUIET, panels
from run_files import reference_rewards
from scipy.interpolate import PchipInterpolator
from seeds import Quantity, Seed, Trained, WinRate, over_seeds

from infalign import (
    ConfigError,
    Estimate,
    RewindAndRepeat,
    calibrate,
    estimate,
    law_at_kl,
    parse_procedure,
    parse_transform,
    rank_optimum,
)

ANALYTIC_PROCEDURES = ("standard", "best-of-2", "best-of-4", "worst-of-2", "worst-of-4")
ANALYTIC_TRANSFORMS = ("identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "optimal")
ANALYTIC_COLUMNS = ("procedure", "transform", "kl", "beta", "win_rate", "standard_win_rate")
SWEEP = np.linspace(0.1, np.sqrt(5.0), 25) ** 2  # nats; at small KL win rates rise like its square root
SHOWN_PROMPTS = 10
ENDS = ("mean", "low", "high")
COLOR_OF_TRANSFORM = {  # the same in every figure
    "identity": COLORS[0],
    "log": COLORS[4],
    "exp:5": COLORS[2],
    "exp:10": COLORS[1],
    "exp:-5": COLORS[5],
    "exp:-10": COLORS[3],
    "optimal": INK,
}
SOLVER_COLORS = dict(zip(("rloo", "qrpo", "ppo", "grpo", "ipo", "maxk"), COLORS, strict=True)) | {"resample": QUIET}


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn in a style that is set, its caption, and its numbers as a table."""

    figure: Any  # matplotlib.figure.Figure
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Point:
    """A policy of theory: its KL to the base policy in nats, β and win rates, served alike and both by one draw."""

    procedure: str
    transform: str
    kl: float
    beta: float
    win_rate: float
    standard_win_rate: float


def sweep(procedure: Any, transform: str) -> list[Point]:
    """Return the points of a transformation or the optimum, 0.01 to 5 nats, up to the first that is out of reach."""
    points = list[Point]()
    for kl in map(float, SWEEP):
        try:
            best = rank_optimum(procedure, kl=kl) if transform == "optimal" else None
            law = best.law if best else law_at_kl(parse_transform(transform), kl=kl)
        except ConfigError:
            break
        win_rate = best.win_rate if best else law.win_rate(procedure)
        standard = law.win_rate(parse_procedure("standard"))
        points.append(Point(procedure.name, transform, best.kl if best else law.kl, law.beta, win_rate, standard))
    return points


def draw_theory(points: Sequence[Point]) -> Drawing:
    """Draw theory's curves."""
    rows = [[getattr(point, column) for column in ANALYTIC_COLUMNS] for point in points]
    caption = "Theory: a policy that is free for every prompt. Dashed: the optimum for the procedure."
    return Drawing(draw_analytic(points), caption, ANALYTIC_COLUMNS, rows)


def analytic_points() -> list[Point]:
    """Return the points of five procedures, six transformations and the optimum of each, 0.01 to 5 nats."""
    return [
        point
        for procedure in map(parse_procedure, ANALYTIC_PROCEDURES)
        for name in ANALYTIC_TRANSFORMS
        for point in sweep(procedure, name)
    ]


def draw_analytic(points: Sequence[Point]) -> Any:
    """Return a figure of `analytic_points`, a panel for each procedure, for a style that is set."""
    figure, grid = panels(2, 3, (8.4, 5.0))
    for axes, procedure in zip([*grid[0], *grid[1, 1:]], ANALYTIC_PROCEDURES, strict=True):
        for name, line in by_transform(point for point in points if point.procedure == procedure).items():
            plot_line(axes, line, COLOR_OF_TRANSFORM[name], label=name)
        axes.set(title=procedure, xlim=(0, 3), ylim=(50, 100))
    for axes in (grid[0, 0], grid[1, 1]):
        axes.set(ylabel="win rate, %")
    for axes in (grid[0, 0], *grid[1, 1:]):
        axes.set(xlabel="KL to the base policy, nats")
    grid[1, 0].set_axis_off()
    lines = grid[0, 0].get_legend_handles_labels()
    grid[1, 0].legend(*lines, loc="center", title="Transformation", alignment="left")
    return figure


def by_transform(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return the points of each transformation, in their order."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.transform, []).append(point)
    return lines


def plot_line(axes: Any, line: Sequence[Point], color: str, label: str | None = None) -> None:
    """Draw one transformation's win rate, from 50 % at 0 nats; the optimum dashed, on top."""
    kl, win_rate = np.array([(0.0, 0.5), *((point.kl, point.win_rate) for point in line)]).T
    root = np.sqrt(kl)  # win rates are smooth in √KL
    fine = np.linspace(root[0], root[-1], 200)
    dash, above = ((0, (4, 2)), 3) if line[0].transform == "optimal" else ("-", 2)
    wins = 100 * PchipInterpolator(root, win_rate)(fine)
    axes.plot(fine**2, wins, linestyle=dash, color=color, zorder=above, label=label)


def draw_ranks(seeds: Sequence[Seed]) -> Drawing:
    """Draw rank against raw reward for ten training prompts of the first seed."""
    rewards_PK = reference_rewards(seeds[0].recipe.run_dir)
    order = np.argsort(np.median(rewards_PK, axis=1), kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, SHOWN_PROMPTS).astype(int))]
    few = np.unique(np.linspace(0, rewards_PK.shape[1] - 1, 100).astype(int))  # enough for a smooth curve
    figure, axes = panels(1, 1, (6.4, 3.4))
    shades = colormaps["viridis"](0.25 + 0.6 * np.arange(len(chosen)) / max(len(chosen) - 1, 1))
    for rewards, color in zip(rewards_PK[chosen], shades, strict=True):
        axes.plot(rewards[few], calibrate(rewards, rewards)[few], ".-", color=color, markersize=4, linewidth=0.6)
    axes.set(xlabel="raw reward", ylabel="calibrated reward")
    rows = [
        [prompt, reward, rank]
        for prompt, rewards in enumerate(rewards_PK)
        for reward, rank in zip(rewards, calibrate(rewards, rewards), strict=True)
    ]
    caption = (
        f"The same raw reward ranks high for one prompt and low for another. {len(chosen)} of {len(order)} training "
        f"prompts, evenly spaced by median reward (dark: low), {len(rewards_PK[0])} responses each. "
        f"Seed {seeds[0].recipe.seed}."
    )
    return Drawing(figure, caption, ("prompt", "raw_reward", "calibrated_reward"), rows)


def draw_decisions(seeds: Sequence[Seed]) -> Drawing:
    """Draw how many test pairs each reward model decides rightly; ties, which count ½, are hatched."""
    decided = [Hacking(seed.recipe).decisions() for seed in seeds]

    def mean(name: str, test: str, ties: bool) -> Estimate:
        values = [(ids, right[name][test]) for ids, right in decided]
        return over_seeds([Trained(ids, v == 0.5 if ties else v) for ids, v in values])

    rows, width = [], 0.8 / len(MODELS)
    figure, axes = panels(1, 1, (6.4, 3.4))
    for i, (name, color) in enumerate(zip(MODELS, COLORS, strict=False)):
        for place, test in enumerate(TESTS):
            right, tied = mean(name, test, ties=False), mean(name, test, ties=True)
            rows.append([test, name, *(getattr(e, end) for e in (right, tied) for end in ENDS)])
            at, top, hatched = place + (i - (len(MODELS) - 1) / 2) * width, 100 * right.mean, 50 * tied.mean
            axes.bar(at, top, 0.9 * width, color=color, label=name if place == 0 else None)
            axes.bar(at, hatched, 0.9 * width, top - hatched, color="none", edgecolor=INK, hatch="////", linewidth=0)
            axes.vlines(at, 100 * right.low, 100 * right.high, color=INK, linewidth=1)
    axes.axhline(50, color=QUIET, linewidth=0.8)
    axes.set_xticks(range(len(TESTS)), list(TESTS))
    axes.set(xlabel="test pairs", ylabel="right, %", ylim=(0, 100))
    figure.legend(loc="outside upper left", ncols=3)
    columns = ("test", "model", *(f"{what}_{end}" for what in ("right", "tied") for end in ENDS))
    caption = f"Test pairs decided rightly; ties, which count half, are hatched. {_over(seeds)}"
    return Drawing(figure, caption, columns, rows)


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


def draw_against_kl(seeds: Sequence[Seed], methods: Sequence[str], quantities: Sequence[Quantity]) -> Drawing:
    """Draw quantities against KL, a panel each: a method's mean over seeds at each budget, and faint every policy.

    Win rates by the reward have theory's curves of identity and optimum. The axis ends at four times the median KL of
    those that have learned.
    """
    trained = [method for method in methods if all(method in seed.by_method for seed in seeds)]
    marks = {quantity: list(_marks(seeds, trained, quantity)) for quantity in quantities}
    shown = [mark for own in marks.values() for mark in own]
    end = MAX_KL_RATIO * float(np.median([kl for mark in shown if (kl := mark.kl.mean) >= MIN_KL] or [MIN_KL]))
    most = 1.06 * max([MIN_KL, *(mark.kl.high for mark in shown if mark.kl.mean <= end)])
    columns = min(len(quantities), 2)
    down = -(-len(quantities) // columns)
    figure, grid = panels(down, columns, (1.2 + 3.5 * columns, 0.9 + 2.9 * down))
    for axes, quantity in zip_longest(np.ravel(grid), quantities):
        if quantity is None:
            axes.set_axis_off()
            continue
        if isinstance(quantity, WinRate) and quantity.judge == "reward":
            draw_theory_of(axes, quantity.procedure)
        lines: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {method: [] for method in trained}
        for mark in sorted(marks[quantity], key=lambda mark: mark.kl.mean):
            if mark.seed is None:
                lines[mark.method].append((mark.kl.as_dict(), mark.value.as_dict()))
            elif mark.kl.mean <= most:
                at, color = (mark.kl.mean, quantity.scale * mark.value.mean), color_of(mark.method)
                axes.plot(*at, ".", color=color, alpha=0.4, markersize=3)
        draw_methods(axes, lines, most, scale=quantity.scale)
        axes.set(xlabel="KL to the reference, nats", ylabel=quantity.label, xlim=(0, most))
        if isinstance(quantity, WinRate):  # an interval over two seeds may reach beyond
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 0.0), min(high, 100.0))
    figure.legend(*np.ravel(grid)[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    columns = ("quantity", "method", "policy", "seed", *(f"{what}_{end}" for what in ("kl", "value") for end in ENDS))
    rows = [[quantity.label, *mark.cells()] for quantity, own in marks.items() for mark in own]
    return Drawing(figure, f"Filled: ours. Dots: single trainings. {_over(seeds)}", columns, rows)


def draw_theory_of(axes: Any, procedure: Any) -> None:
    """Draw theory's win rates of the identity and the optimum against KL, in per cent, dashed; of a rewind none."""
    if isinstance(procedure, RewindAndRepeat):
        return
    for name, color in {"identity": QUIET, "optimal": INK}.items():
        plot_line(axes, sweep(procedure, name), color, label=f"theory, {name}")
        axes.lines[-1].set(linestyle="--", linewidth=1)


def draw_methods(
    axes: Any, lines: dict[str, list[tuple[dict[str, float], dict[str, float]]]], max_kl: float, *, scale: float
) -> None:
    """Draw each method's policies, (KL, value) in order of KL, with both intervals, and join them.

    Colors mark solvers; methods of one color have markers of their own, ours filled. Values are multiplied by
    ``scale``; the legend gives KLs over ``max_kl``.
    """
    markers: dict[str, Iterator[str]] = {}
    for name, policies in lines.items():
        color = color_of(name)
        marker = next(markers.setdefault(color, cycle(MARKERS)))
        for kl, value in policies:
            axes.plot([kl["low"], kl["high"]], [scale * value["mean"]] * 2, color=color, linewidth=0.8)
            axes.plot([kl["mean"]] * 2, [scale * value["low"], scale * value["high"]], color=color, linewidth=0.8)
        axes.plot(
            [kl["mean"] for kl, _ in policies],
            [scale * value["mean"] for _, value in policies],
            color=color,
            marker=marker,
            markersize=4,
            markerfacecolor=color if name != BEST_OF_N and read_method(name).ours else PAPER,
            linewidth=1,
            label=", ".join([name, *(f"{kl['mean']:.3g} nats" for kl, _ in policies if kl["mean"] > max_kl)]),
            zorder=3,
        )


def color_of(method: str) -> str:
    """Return the color of a method's solver."""
    return QUIET if method == BEST_OF_N else SOLVER_COLORS.get(read_method(method).solver, INK)


def _marks(seeds: Sequence[Seed], methods: Sequence[str], quantity: Quantity) -> Iterator[Mark]:
    for method in methods:
        for seed in seeds:
            for name in seed.by_method[method]:
                both = (estimate(v) for v in (seed.kl(name), seed.values(quantity, name)))
                yield Mark(method, name, seed.recipe.seed, *both)
        for name in seeds[0].by_method[method]:
            if all(name in seed.by_method[method] for seed in seeds):
                kls = [seed.trained(seed.kl(name)) for seed in seeds]
                values = [seed.trained(seed.values(quantity, name)) for seed in seeds]
                yield Mark(method, name, None, *(over_seeds(v) for v in (kls, values)))


def _over(seeds: Sequence[Seed]) -> str:
    return f"Bars: 95% intervals over {len(seeds)} seeds and their test prompts."
