"""The figures of the paper (arXiv 2412.19792, ICML 2025) by their numbers in the order of captions, and its claims.

A figure is an entry of `FIGURES`: the methods that it trains, what is drawn, and claims. A claim is a sentence of the
paper, what measures it, and between which values it holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from best_of_n import BEST_OF_N
from drawings import Drawing, draw_against_kl, draw_decisions, draw_ranks, draw_theory
from hacking import Hacking
from measurements import (
    USUAL_KL,
    K,
    Measurement,
    RawReward,
    RewindDraws,
    calibration_cost,
    decided_rightly,
    draws_saved,
    lead_over_best,
    least_lead_in_theory,
    miscalibration,
    raw_reward_bought,
    theory_points,
)
from methods import extreme_procedure
from run_files import Recipe, finish
from seeds import Quantity, Seed, WinRate

from infalign import Estimate, parse_procedure

Verdict = Literal["confirmed", "refuted", "undecided"]
JUDGES = ("reward", "judge")
BASELINES = ("qrpo-identity", "qrpo-raw", "rloo-raw", "ipo", "bonbon", "bond")


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
    study: Callable[[Recipe], object] | None = None  # what else is done for each seed
    lacks: Callable[[Recipe], str] = lambda recipe: ""  # why a recipe cannot have it, "" if it can

    @property
    def name(self) -> str:
        """``figure-4``."""
        return "-".join(["figure", *map(str, self.numbers)])

    @property
    def trains(self) -> bool:
        """Whether it needs a recipe and seeds."""
        return bool(self.methods) or self.study is not None


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
        study=lambda recipe: finish(recipe, "calibrate"),
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
        study=lambda recipe: Hacking(recipe).make(),
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
