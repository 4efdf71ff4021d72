"""The figures of the paper (arXiv 2412.19792, ICML 2025) by their numbers in the order of captions, and its claims.

A figure is an entry of `FIGURES`: the methods that it trains, what is drawn, and claims. A claim is a sentence of the
paper, what measures it, and between which values it holds; `evaluation.seeds.verdict` says whether it does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
from rich.console import Console

from infalign.core.display import in_points
from infalign.core.storage import listed, read_table
from infalign.evaluation.seeds import Trained
from infalign.experiments.drawings import (
    Drawn,
    drawn_analytic,
    drawn_by_kl,
    drawn_hacking,
    drawn_ranks,
    experiment_of,
)
from infalign.experiments.hacking import hacking, right_or_wrong
from infalign.experiments.methods import ITSELF, extreme_procedure
from infalign.experiments.seeds import Measurement, Quantity, RawReward, RewindDraws, Seed, WinRate, lead
from infalign.method.calibration import Array, calibrate
from infalign.method.procedures import Served, Standard
from infalign.pipeline.records import records
from infalign.recipe.resolved import reference_rewards
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run
from infalign.theory.curve import Point
from infalign.theory.figures import analytic_points

JUDGES = ("reward", "judge")
K = 100  # the paper's rollouts a prompt
BASELINES = ("qrpo-identity", "qrpo-raw", "rloo-raw", "ipo", "bonbon", "bond", "grpo-once")
USUAL_KL = (0.1, 3.0)  # nats: where theory's transformations are compared


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what measures it, and between which values it holds."""

    says: str
    measured: str  # what the number is
    value: Callable[[Sequence[Seed]], Measurement]
    least: float = -math.inf
    most: float = math.inf
    unit: str = "points"
    write: Callable[[float], str] = in_points

    @property
    def holds(self) -> str:
        """Where it holds: ``more than +3.0 points``."""
        ends = [("more than", self.least), ("less than", self.most)]
        return ", ".join(f"{word} {self.write(end)} {self.unit}" for word, end in ends if math.isfinite(end))


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its numbers there, what it needs and what it shows, from runs of several seeds."""

    numbers: tuple[int, ...]
    title: str
    draw: Callable[[Sequence[Seed]], Drawn]
    claims: Sequence[Claim] = ()
    methods: Sequence[str] = ()  # that are trained at each KL budget and compared
    study: Callable[[Recipe, Console], object] | None = None  # what else is done for each seed
    lacks: Callable[[Recipe], str] = field(default=lambda recipe: "")  # why a recipe cannot have it, "" if it can

    @property
    def name(self) -> str:
        """``figure-4``."""
        return "-".join(["figure", *map(str, self.numbers)])

    @property
    def trains(self) -> bool:
        """Whether it needs a recipe and seeds."""
        return bool(self.methods) or self.study is not None


def by_kl(
    number: int,
    title: str,
    methods: Sequence[str],
    quantities: Callable[[Recipe], Sequence[Quantity]],
    claims: Sequence[Claim],
) -> Figure:
    """Return a figure that compares methods: quantities against KL, of which those are drawn that the recipe has."""

    def possible(recipe: Recipe) -> list[Quantity]:
        return [quantity for quantity in quantities(recipe) if not quantity.lacks(recipe)]

    def lacks(recipe: Recipe) -> str:
        return "" if possible(recipe) else quantities(recipe)[0].lacks(recipe)

    def draw(seeds: Sequence[Seed]) -> Drawn:
        return drawn_by_kl(seeds, methods, possible(seeds[0].recipe))

    return Figure((number,), title, draw, claims, methods, lacks=lacks)


def own(recipe: Recipe) -> Served:
    """Return the recipe's procedure."""
    return recipe.procedure


def standard(recipe: Recipe) -> Served:
    """Return one plain draw."""
    return Standard()


def rewinding(recipe: Recipe) -> Served:
    """Return the recipe's Rewind-and-Repeat."""
    return recipe.evaluate.rewind


def of(n: int) -> Callable[[Recipe], Served]:
    """Return what gives Best- or Worst-of-n, whichever the recipe's procedure is."""
    return lambda recipe: replace(extreme_procedure(recipe), n=n)


def win_rates_as(*served: Callable[[Recipe], Served]) -> Callable[[Recipe], list[Quantity]]:
    """Return what gives the win rates under some procedures by the reward and by the judge."""
    return lambda recipe: [WinRate(procedure(recipe), judge) for procedure in served for judge in JUDGES]


def ahead(
    says: str,
    ours: str,
    others: Sequence[str],
    served: Callable[[Recipe], Served],
    least: float = 0.0,
) -> list[Claim]:
    """Return the claim, for each judge, that a method wins by so much more than the best of others at one KL."""

    def value(judge: str, seeds: Sequence[Seed]) -> Measurement:
        return lead(seeds, ours, others, WinRate(served(seeds[0].recipe), judge))

    above = others[0] if len(others) == 1 else f"the best of {len(others)} others"
    return [
        Claim(says, f"{ours} above {above} at one KL, by the {judge}", partial(value, judge), least=least)
        for judge in JUDGES
    ]


# Theory, without a recipe


@cache
def _points() -> list[Point]:
    return analytic_points()


def least_lead_in_theory(procedure: str, ours: str, others: Sequence[str], seeds: Sequence[Seed]) -> Measurement:
    """Return how much more a transformation wins than the best of others, at the KL where that is least."""
    wins = {
        (point.transform, round(point.kl, 6)): point.win_rate for point in _points() if point.procedure == procedure
    }
    leads = [
        won - max(wins[other, kl] for other in others)
        for (name, kl), won in wins.items()
        if name == ours and USUAL_KL[0] <= kl <= USUAL_KL[1]
    ]
    return Measurement(exact=min(leads))


# The reference's rollouts


def miscalibration(seeds: Sequence[Seed]) -> Measurement:
    """Return how far the rank of a rollout among all prompts' rewards is from its rank among its own prompt's.

    What the same numbers give if they are dealt to the prompts at random is subtracted: with K rollouts a prompt, ranks
    within it are not exact either.
    """
    return Measurement([_miscalibrated(seed) for seed in seeds], "mean distance of ranks, chance subtracted")


def _miscalibrated(seed: Seed) -> Trained:
    rewards_PK = reference_rewards(seed.layout)
    everyone = np.sort(rewards_PK, axis=None)

    def distance(dealt_PK: Array) -> Array:
        within = calibrate(dealt_PK, np.sort(dealt_PK, axis=1))
        among_all = calibrate(dealt_PK.ravel(), everyone).reshape(dealt_PK.shape)
        return np.asarray(np.abs(within - among_all).mean(axis=1))

    dealt = np.random.default_rng(0).permutation(rewards_PK.ravel()).reshape(rewards_PK.shape)
    prompts = listed(read_table(seed.layout.calibrated, ["prompt_id"]), "prompt_id")
    return Trained(prompts, distance(rewards_PK) - distance(dealt).mean())


# Reward models from poisoned pairs


def decided_rightly(model: str, above: str | None, seeds: Sequence[Seed]) -> Measurement:
    """Return the share of inverted test pairs that a model decides rightly, or how far that is above another's."""
    found = []
    for seed in seeds:
        prompt_ids, right = right_or_wrong(experiment_of(seed))
        found.append(Trained(prompt_ids, right[model]["inverted"] - (right[above]["inverted"] if above else 0.0)))
    return Measurement(found)


def no_reward_model(recipe: Recipe) -> str:
    """Return why preferences cannot be poisoned, "" if they can."""
    return "the recipe trains no reward model that could be poisoned" if recipe.reward.fit is None else ""


# Costs


def calibration_cost(trained: Sequence[str], seeds: Sequence[Seed]) -> Measurement:
    """Return the seconds of calibration with the paper's K by those of training, the mean over policies of ``trained``.

    Calibration is drawing, scoring and ranking the rollouts, which takes time in proportion to K.
    """
    found = []
    for seed in seeds:
        made = records(seed.layout.root)
        drawn = [name for name in made if name.startswith(("rollout-", "score-"))]
        spent = sum(made[name]["seconds"] for name in [*drawn, "calibrate"])
        policies = [name for method in trained if method in seed.trained_methods for name in seed.policies_of(method)]
        if not policies:
            return Measurement(note=f"none of {', '.join(trained)} was trained")
        training = np.mean([made[f"train-{name}"]["seconds"] for name in policies])
        found.append(Trained((), np.array([spent * K / seed.recipe.rollout.k / training])))
    return Measurement(found, f"from K = {seeds[0].recipe.rollout.k}")


def draws_saved(ours: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how many draws fewer a method's policies take than the reference, the mean over its budgets."""
    if any(ours not in seed.trained_methods for seed in seeds):
        return Measurement(note=f"{ours} was not trained")
    draws = RewindDraws()
    found = [
        seed.trained(
            seed.values(draws, "reference")
            - np.mean([seed.values(draws, name) for name in seed.policies_of(ours)], axis=0)
        )
        for seed in seeds
    ]
    return Measurement(found, f"{ours}, mean over its budgets")


def raw_reward_bought(ours: str, other: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how much more raw reward a method has than another at one KL."""
    return lead(seeds, ours, [other], RawReward())


MORE = "The transformation for the procedure wins 3 to 8 points more than the best baseline at the same KL."
MORE_TOO = "For N = {} it wins more than the best baseline as well."
PARITY = "On the standard win rate calibrated rewards are on a par with GRPO, without its groups."
GRPO = "Served as Best-of-N, they win more than GRPO at the same KL."
percent = "{:.1f}".format

FIGURES = [
    Figure(
        (2, 11),
        "Win rate against KL in theory",
        lambda seeds: drawn_analytic(_points()),
        [
            Claim(
                f"For {procedure} an exponential of the rank wins more than the identity and the logarithm.",
                f"{ours} above the better of the two, where that is least, {USUAL_KL[0]:g} to {USUAL_KL[1]:g} nats",
                partial(least_lead_in_theory, procedure, ours, ("identity", "log")),
                least=0.0,
            )
            for procedure, ours in {"best-of-4": "exp:10", "worst-of-4": "exp:-10"}.items()
        ],
    ),
    Figure(
        (3,),
        "Raw rewards are not calibrated",
        drawn_ranks,
        [
            Claim(
                "The same reward ranks high for one prompt and low for another.",
                "how far a rollout's rank among all prompts is from that among its own prompt's, above chance",
                miscalibration,
                least=0.0,
                unit="points of rank",
            )
        ],
        study=lambda recipe, console: whole_run.run_recipe(recipe, until="calibrate", console=console),
    ),
    by_kl(
        4,
        "Win rates against KL",
        ("qrpo", "rloo", *BASELINES, ITSELF),
        win_rates_as(standard, own),
        [*ahead(MORE, "qrpo", BASELINES, own, 0.03), *ahead(MORE, "rloo", BASELINES, own, 0.03)],
    ),
    by_kl(
        5,
        "N = 2",
        ("qrpo-for-2", *BASELINES),
        win_rates_as(of(2)),
        ahead(MORE_TOO.format(2), "qrpo-for-2", BASELINES, of(2)),
    ),
    by_kl(
        6,
        "Calibrated rewards, GRPO and Best-of-N, served plainly",
        ("qrpo-identity", "ppo-identity", "grpo-once", "grpo-raw", ITSELF),
        win_rates_as(standard),
        [
            *ahead(PARITY, "ppo-identity", ["grpo-raw"], standard, -0.01),
            *ahead(PARITY, "qrpo-identity", ["grpo-once"], standard, -0.01),
            Claim(
                f"With K = {K} rollouts a prompt calibration takes about 29 % of the time of training.",
                f"seconds of rollouts, scores and ranks for K = {K} by those of on-policy training",
                partial(calibration_cost, ("ppo-identity",)),
                most=0.295,
                unit="%",
                write=lambda value: percent(100 * value),
            ),
        ],
    ),
    Figure(
        (7,),
        "Reward hacking",
        drawn_hacking,
        [
            Claim(
                "Calibrated rewards are more robust to poisoned preferences.",
                f"inverted pairs that {said} decides rightly, above the poisoned reward model",
                partial(decided_rightly, model, "poisoned"),
                least=0.0,
            )
            for model, said in {"ranked": "the rank itself", "calibrated": "a model trained on ranks"}.items()
        ]
        + [
            Claim(
                "Calibration mitigates reward hacking.",
                "inverted pairs that a model trained on ranks decides rightly: more than a coin does",
                partial(decided_rightly, "calibrated", None),
                least=0.5,
                unit="%",
                write=lambda value: percent(100 * value),
            )
        ],
        study=lambda recipe, console: hacking(recipe, console=console),
        lacks=no_reward_model,
    ),
    by_kl(
        8,
        "N = 32",
        ("qrpo-for-32", *BASELINES),
        win_rates_as(of(32)),
        ahead(MORE_TOO.format(32), "qrpo-for-32", BASELINES, of(32)),
    ),
    by_kl(
        9,
        "Raw reward against KL",
        ("qrpo", *BASELINES),
        lambda recipe: [RawReward()],
        [
            Claim(
                "RLHF on the reward as it is gains more of that reward, which is not what is served.",
                "raw reward of qrpo-raw above that of qrpo at one KL",
                partial(raw_reward_bought, "qrpo-raw", "qrpo"),
                least=0.0,
                unit="sd",
                write="{:+.2f}".format,
            )
        ],
    ),
    by_kl(
        10,
        "GRPO, served as the procedure",
        ("qrpo", "rloo", "grpo-once", "grpo-raw"),
        win_rates_as(own),
        [*ahead(GRPO, "qrpo", ["grpo-once", "grpo-raw"], own), *ahead(GRPO, "rloo", ["grpo-once", "grpo-raw"], own)],
    ),
    by_kl(
        12,
        "Rewind-and-Repeat",
        ("qrpo", *BASELINES),
        lambda recipe: [*win_rates_as(rewinding)(recipe), RewindDraws()],
        [
            *ahead("Served by Rewind-and-Repeat it wins more as well.", "qrpo", BASELINES, rewinding),
            Claim(
                "It takes fewer draws.",
                "draws of the reference above those of qrpo",
                partial(draws_saved, "qrpo"),
                least=0.0,
                unit="draws",
                write="{:+.2f}".format,
            ),
        ],
    ),
]
BY_NUMBER = {number: figure for figure in FIGURES for number in figure.numbers}
