"""The figures of the paper (arXiv 2412.19792, ICML 2025) by their numbers in the order of captions, and its claims.

A figure is an entry of `FIGURES`: the methods that it trains, what is drawn, and claims. A claim is a sentence of the
paper, what measures it, and between which values it holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
from best_of_n import BEST_OF_N
from drawings import Drawing, Point, analytic_points, draw_against_kl, draw_decisions, draw_ranks, draw_theory
from hacking import Hacking
from methods import extreme_procedure
from rich.console import Console
from run_files import column, records, reference_rewards
from seeds import Estimate, Quantity, Seed, Trained, WinRate, lead, over_seeds

from infalign import calibrate, parse_procedure
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run

Verdict = Literal["confirmed", "refuted", "undecided"]
JUDGES = ("reward", "judge")
K = 100  # the paper's rollouts per prompt
BASELINES = ("qrpo-identity", "qrpo-raw", "rloo-raw", "ipo", "bonbon", "bond")
USUAL_KL = (0.1, 3.0)  # nats: where theory's transformations are compared


@dataclass(frozen=True)
class Measurement:
    """What was measured for a claim: by seed, or an exact number; ``note`` says what of, or why there is nothing."""

    seeds: Sequence[Trained] = ()
    note: str = ""
    exact: float | None = None

    def estimate(self, confidence: float) -> Estimate | None:
        """Return the mean with its interval over seeds and prompts; None if nothing was measured."""
        if self.exact is not None:
            return Estimate(self.exact, self.exact, self.exact)
        return over_seeds(self.seeds, confidence=confidence) if self.seeds else None


def points(difference: float) -> str:
    """Return a difference of shares in percentage points: ``+1.2``."""
    return f"{100 * difference:+.1f}"


def percent(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.1f}"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what measures it, and between which values it holds."""

    says: str
    measured: str  # what the number is
    value: Callable[[Sequence[Seed]], Measurement]
    least: float = -math.inf
    most: float = math.inf
    unit: str = "points"
    write: Callable[[float], str] = points

    @property
    def holds(self) -> str:
        """Where it holds: ``more than +3.0 points``."""
        ends = [("more than", self.least), ("less than", self.most)]
        return ", ".join(f"{word} {self.write(end)} {self.unit}" for word, end in ends if math.isfinite(end))

    def judge(self, found: Estimate | None) -> Verdict:
        """Return what an interval says of the claim: all of it inside, all of it outside, or neither."""
        if found is None:
            return "undecided"
        if self.least < found.low and found.high < self.most:
            return "confirmed"
        return "refuted" if found.high <= self.least or self.most <= found.low else "undecided"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its numbers there, what it needs and what it shows, from runs of several seeds."""

    numbers: tuple[int, ...]
    title: str
    draw: Callable[[Sequence[Seed]], Drawing]
    claims: Sequence[Claim] = ()
    methods: Sequence[str] = ()  # that are trained at each KL budget and compared
    study: Callable[[Recipe, Console], object] | None = None  # what else is done for each seed
    lacks: Callable[[Recipe], str] = lambda recipe: ""  # why a recipe cannot have it, "" if it can

    @property
    def name(self) -> str:
        """``figure-4``."""
        return "-".join(["figure", *map(str, self.numbers)])

    @property
    def trains(self) -> bool:
        """Whether it needs a recipe and seeds."""
        return bool(self.methods) or self.study is not None


class RawReward(Quantity):
    """The reward above the reference's, in standard deviations of the reference's rewards within prompts."""

    label: ClassVar[str] = "raw reward above the reference, sd"

    def of(self, seed: Seed, name: str) -> np.ndarray:
        """Return each prompt's mean reward above the reference's."""
        base = seed.evaluated.column("reference", "reward")
        own = seed.evaluated.column(name, "reward").mean(axis=1)
        return np.asarray((own - base.mean(axis=1)) / np.sqrt(base.var(axis=1, ddof=1).mean()))


class RewindDraws(Quantity):
    """How many draws the recipe's Rewind-and-Repeat takes."""

    label: ClassVar[str] = "draws per response"

    def of(self, seed: Seed, name: str) -> np.ndarray:
        """Return the expected number of draws to each prompt."""
        own, base = (
            Samples(values, values) for values in (seed.evaluated.column(m, "reward") for m in (name, "reference"))
        )
        return rewind_draws(base if name == "reference" else own, base, seed.evaluated.rewind)


def by_kl(
    number: int, title: str, methods: Sequence[str], quantities: Callable[[Recipe], Sequence[Quantity]], *claims: Claim
) -> Figure:
    """Return a figure that compares methods: quantities against KL, of which those are drawn that the recipe has."""

    def possible(recipe: Recipe) -> list[Quantity]:
        return [quantity for quantity in quantities(recipe) if not quantity.lacks(recipe)]

    def lacks(recipe: Recipe) -> str:
        return "" if possible(recipe) else quantities(recipe)[0].lacks(recipe)

    def draw(seeds: Sequence[Seed]) -> Drawing:
        return draw_against_kl(seeds, methods, possible(seeds[0].recipe))

    return Figure((number,), title, draw, claims, methods, lacks=lacks)


Procedure = Callable[[Recipe], Any]


def served_by(n: int | None = None) -> Procedure:
    """Return what gives the recipe's procedure, or Best- or Worst-of-n, whichever it is."""
    return lambda recipe: recipe.procedure if n is None else replace(extreme_procedure(recipe), n=n)


def plainly(recipe: Recipe) -> Any:
    """Return one plain draw."""
    return parse_procedure("standard")


def rewinding(recipe: Recipe) -> Any:
    """Return the recipe's Rewind-and-Repeat."""
    return recipe.rewind


def win_rates(*served: Procedure) -> Callable[[Recipe], list[Quantity]]:
    """Return what gives the win rates under some procedures by the reward and by the judge."""
    return lambda recipe: [WinRate(procedure(recipe), judge) for procedure in served for judge in JUDGES]


def ahead(says: str, ours: str, others: Sequence[str], served: Procedure, least: float = 0.0) -> list[Claim]:
    """Return the claim, for each judge, that a method wins by so much more than the best of others at one KL."""

    def value(judge: str, seeds: Sequence[Seed]) -> Measurement:
        return lead_over_best(seeds, ours, others, WinRate(served(seeds[0].recipe), judge))

    above = others[0] if len(others) == 1 else f"the best of {len(others)} others"
    return [
        Claim(says, f"{ours} above {above} at one KL, by the {judge}", partial(value, judge), least) for judge in JUDGES
    ]


def lead_over_best(seeds: Sequence[Seed], ours: str, others: Sequence[str], quantity: Quantity) -> Measurement:
    """Return how far a method is above the best of others, each at a KL that the two spend, the mean over the budgets.

    A method that spends little does so lower the KL of no pair but its own. The best is the one over which the lead is
    smallest: one method in all seeds, chosen by these very numbers, which favors it a little. Budgets at which the two
    cannot be compared do not count.
    """
    for seed in seeds:
        if reason := quantity.lacks(seed.recipe):
            return Measurement(note=reason)
        if ours not in seed.by_method or seed.by_method.keys().isdisjoint(others):
            return Measurement(note=f"{ours} or all that it is compared with was left out")
    leads = {other: [mean_lead(seed, ours, other, quantity) for seed in seeds] for other in others}
    over = {other: known for other, found in leads.items() if len(known := [one for one in found if one]) == len(seeds)}
    if not over:
        return Measurement(note=f"in some seed {ours} spends no KL that another method spends too; give more budgets")
    best = min(over, key=lambda other: float(np.mean([one.mean for one in over[other]])))
    missed = [other for other in others if other not in over]
    return Measurement(over[best], f"{ours} over {best}" + (f"; not compared: {', '.join(missed)}" if missed else ""))


def mean_lead(seed: Seed, ours: str, other: str, quantity: Quantity) -> Trained | None:
    """Return a method's lead over another, the mean over the budgets at which they can be compared, if there is one."""
    if other not in seed.by_method:
        return None
    found = []
    for names in seed.policies.by_budget.values():
        both = [name for name in names if name in seed.by_method[ours] or name in seed.by_method[other]]
        median = float(np.median([seed.kl(name).mean() for name in both]))
        if matched := lead((seed, ours), (seed, other), quantity, median):
            found.append(matched)
    if not found:
        return None
    shifts = np.mean([(own.shift, -its.shift) for own, its in found], axis=0)
    return seed.trained(np.mean([own.values - its.values for own, its in found], axis=0), *shifts)


@cache
def theory_points() -> list[Point]:
    """Return theory's curves."""
    return analytic_points()


def least_lead_in_theory(procedure: str, ours: str, others: Sequence[str], seeds: Sequence[Seed]) -> Measurement:
    """Return how much more a transformation wins than the best of others, at the KL where that is least."""
    points = [point for point in theory_points() if point.procedure == procedure]
    wins = {(point.transform, round(point.kl, 6)): point.win_rate for point in points}
    usual = [kl for name, kl in wins if name == ours and USUAL_KL[0] <= kl <= USUAL_KL[1]]
    return Measurement(exact=min(wins[ours, kl] - max(wins[other, kl] for other in others) for kl in usual))


def miscalibration(seeds: Sequence[Seed]) -> Measurement:
    """Return how far the rank of a rollout among all prompts' rewards is from its rank among its own prompt's.

    What the same numbers give if they are dealt to the prompts at random is subtracted: with K rollouts per prompt,
    ranks within it are not exact either.
    """

    def of(seed: Seed) -> Trained:
        rewards_PK = reference_rewards(seed.recipe.run_dir)
        everyone = np.sort(rewards_PK, axis=None)

        def distance(dealt_PK: np.ndarray) -> np.ndarray:
            within = calibrate(dealt_PK, np.sort(dealt_PK, axis=1))
            among_all = calibrate(dealt_PK.ravel(), everyone).reshape(dealt_PK.shape)
            return np.asarray(np.abs(within - among_all).mean(axis=1))

        dealt = np.random.default_rng(0).permutation(rewards_PK.ravel()).reshape(rewards_PK.shape)
        prompts = column(seed.layout.calibrated, "prompt_id")
        return Trained(prompts, distance(rewards_PK) - distance(dealt).mean())

    return Measurement([of(seed) for seed in seeds], "mean distance of ranks, chance subtracted")


def decided_rightly(model: str, above: str | None, seeds: Sequence[Seed]) -> Measurement:
    """Return the share of inverted test pairs that a model decides rightly, or how far that is above another's."""
    found = []
    for seed in seeds:
        prompt_ids, right = Hacking(seed.recipe).decisions()
        found.append(Trained(prompt_ids, right[model]["inverted"] - (right[above]["inverted"] if above else 0.0)))
    return Measurement(found)


def calibration_cost(trained: str, seeds: Sequence[Seed]) -> Measurement:
    """Return the seconds of calibration with the paper's K by those of training a policy of a method, the mean.

    Calibration is drawing, scoring and ranking the rollouts, which takes time in proportion to K.
    """
    found = []
    for seed in seeds:
        if trained not in seed.by_method:
            return Measurement(note=f"{trained} was not trained")
        made = records(seed.layout.root)
        drawn = [name for name in made if name.startswith(("rollout-", "score-"))]
        spent = sum(made[name]["seconds"] for name in [*drawn, "calibrate"])
        training = np.mean([made[f"train-{name}"]["seconds"] for name in seed.by_method[trained]])
        found.append(Trained((), np.array([spent * K / seed.recipe.rollout.k / training])))
    return Measurement(found, f"from K = {seeds[0].recipe.rollout.k}")


def draws_saved(ours: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how many draws fewer a method's policies take than the reference, the mean over its budgets."""
    if any(ours not in seed.by_method for seed in seeds):
        return Measurement(note=f"{ours} was not trained")
    found = []
    for seed in seeds:
        own = np.mean([seed.values(RewindDraws(), name) for name in seed.by_method[ours]], axis=0)
        found.append(seed.trained(seed.values(RewindDraws(), "reference") - own))
    return Measurement(found, f"{ours}, mean over its budgets")


def raw_reward_bought(ours: str, other: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how much more raw reward a method has than another at one KL."""
    return lead_over_best(seeds, ours, [other], RawReward())


MORE = "The transformation for the procedure wins 3 to 8 points more than the best baseline at the same KL."
MORE_TOO = "For N = {} it wins more than the best baseline as well."
PARITY = "On the standard win rate calibrated rewards are on a par with GRPO, without its groups."
GRPO = "Served as Best-of-N, they win more than GRPO at the same KL."
ROBUST = "Calibrated rewards are more robust to poisoned preferences."

FIGURES = [
    Figure(
        (2, 11),
        "Win rate against KL in theory",
        lambda seeds: draw_theory(theory_points()),
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
        draw_ranks,
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
        ("qrpo", "rloo", *BASELINES, BEST_OF_N),
        win_rates(plainly, served_by()),
        *ahead(MORE, "qrpo", BASELINES, served_by(), 0.03),
        *ahead(MORE, "rloo", BASELINES, served_by(), 0.03),
    ),
    by_kl(
        5,
        "N = 2",
        ("qrpo-for-2", *BASELINES),
        win_rates(served_by(2)),
        *ahead(MORE_TOO.format(2), "qrpo-for-2", BASELINES, served_by(2)),
    ),
    by_kl(
        6,
        "Calibrated rewards, GRPO and Best-of-N, served plainly",
        ("qrpo-identity", "ppo-identity", "grpo-raw", BEST_OF_N),
        win_rates(plainly),
        *ahead(PARITY, "ppo-identity", ["grpo-raw"], plainly, -0.01),
        Claim(
            f"With K = {K} rollouts per prompt calibration takes about 29 % of the time of training.",
            f"seconds of rollouts, scores and ranks for K = {K} by those of on-policy training",
            partial(calibration_cost, "ppo-identity"),
            most=0.295,
            unit="%",
            write=percent,
        ),
    ),
    Figure(
        (7,),
        "Reward hacking",
        draw_decisions,
        [
            *(
                Claim(
                    ROBUST,
                    f"inverted pairs that {said} decides rightly, above the poisoned reward model",
                    partial(decided_rightly, model, "poisoned"),
                    least=0.0,
                )
                for model, said in {"ranked": "the rank itself", "calibrated": "a model trained on ranks"}.items()
            ),
            Claim(
                "Calibration mitigates reward hacking.",
                "inverted pairs that a model trained on ranks decides rightly: more than a coin does",
                partial(decided_rightly, "calibrated", None),
                least=0.5,
                unit="%",
                write=percent,
            ),
        ],
        study=lambda recipe, console: Hacking(recipe).make(console),
        lacks=lambda recipe: "" if recipe.reward.fit else "the recipe trains no reward model that could be poisoned",
    ),
    by_kl(
        8,
        "N = 32",
        ("qrpo-for-32", *BASELINES),
        win_rates(served_by(32)),
        *ahead(MORE_TOO.format(32), "qrpo-for-32", BASELINES, served_by(32)),
    ),
    by_kl(
        9,
        "Raw reward against KL",
        ("qrpo", *BASELINES),
        lambda recipe: [RawReward()],
        Claim(
            "RLHF on the reward as it is gains more of that reward, which is not what is served.",
            "raw reward of qrpo-raw above that of qrpo at one KL",
            partial(raw_reward_bought, "qrpo-raw", "qrpo"),
            least=0.0,
            unit="sd",
            write="{:+.2f}".format,
        ),
    ),
    by_kl(
        10,
        "GRPO, served as the procedure",
        ("qrpo", "rloo", "grpo-raw"),
        win_rates(served_by()),
        *ahead(GRPO, "qrpo", ["grpo-raw"], served_by()),
        *ahead(GRPO, "rloo", ["grpo-raw"], served_by()),
    ),
    by_kl(
        12,
        "Rewind-and-Repeat",
        ("qrpo", *BASELINES),
        lambda recipe: [*win_rates(rewinding)(recipe), RewindDraws()],
        *ahead("Served by Rewind-and-Repeat it wins more as well.", "qrpo", BASELINES, rewinding),
        Claim(
            "It takes fewer draws.",
            "draws of the reference above those of qrpo",
            partial(draws_saved, "qrpo"),
            least=0.0,
            unit="draws",
            write="{:+.2f}".format,
        ),
    ),
]
BY_NUMBER = {number: figure for figure in FIGURES for number in figure.numbers}
