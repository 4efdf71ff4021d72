"""Answers of a model that can be listed follow the exact law of the procedure that serves them."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from enumerable import PROMPTS, Enumerable, enumerable
from scipy.stats import binom, chisquare

from infalign.method.calibration import Array
from infalign.method.procedures import parse_procedure
from infalign.method.procedures.majority import MajorityVote
from infalign.models.pretrained import load_policy
from infalign.sampling.engine import Prompt, Sampling
from infalign.serving.answers import Answer, Asked, BaseRewards, ServedPolicy, parse_served
from infalign.serving.batches import Batches
from infalign.serving.draws import LocalDraws

ANSWERS = 1000
PLACE = 1  # of the prompt
Law = Callable[[str], Array]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Enumerable, Enumerable]:
    """Return the base, whose rewards count, and the policy."""
    return enumerable(tmp_path_factory.mktemp("base")), enumerable(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture
def served(models: tuple[Enumerable, Enumerable]) -> tuple[ServedPolicy, Law]:
    """Return a policy to serve, and the exact law of what a procedure serves of it."""
    base, aligned = models
    model, tokenizer = load_policy(aligned.folder)
    law = np.exp(base.laws(model)[PLACE])
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in base.responses]
    rewards = dict(zip(texts, base.rewards[PLACE], strict=True))
    scores = Batches(lambda rows: [rewards[text] for _, text, _ in rows])
    policy = ServedPolicy(
        "policy",
        parse_procedure("standard"),
        2,
        tokenizer,
        LocalDraws(model, tokenizer, rows=512),
        scores,
        BaseRewards(lambda: LocalDraws(*load_policy(base.folder), rows=512), scores, 1001, Sampling(2, seed=1)),
    )

    def law_of(name: str) -> Array:
        procedure = parse_served(name)
        if isinstance(procedure, MajorityVote):  # among those that are no blank text; the first if all are
            p, n, blank = law / law.sum(), procedure.n, np.array([not text.strip() for text in texts])
            of_votes = [MajorityVote(v).served(p * ~blank / p[~blank].sum()) for v in range(1, n + 1)]
            return binom.pmf(range(1, n + 1), n, p[~blank].sum()) @ of_votes + p * blank * p[blank].sum() ** (n - 1)
        return base.finite()[PLACE].served(law / law.sum(), procedure)

    return policy, law_of


def test_draws_of_a_request_that_failed_are_not_made(models: tuple[Enumerable, Enumerable]) -> None:
    """What fails with the first rows fails the request, and its other draws are abandoned; the next is answered."""
    model, tokenizer = load_policy(models[1].folder)
    draws = LocalDraws(model, tokenizer, rows=2)

    def fails(*_: object) -> None:
        hook.remove()
        raise RuntimeError("no memory")

    hook = model.register_forward_pre_hook(fails)
    prompt = Prompt("p", [4, 5, 6])

    async def ask() -> None:
        work = asyncio.create_task(draws.work())
        with pytest.raises(RuntimeError, match="no memory"):
            await draws.draw(prompt, range(6), Sampling(2))
        await draws.draw(prompt, [0], Sampling(2))
        work.cancel()

    asyncio.run(ask())
    assert (draws.counts["draws"], draws.counts["abandoned_draws"], draws.in_progress) == (1, 4, 0)


def test_the_base_is_loaded_once(models: tuple[Enumerable, Enumerable], served: tuple[ServedPolicy, Law]) -> None:
    """Also if who asked first goes while it is loaded: a second one beside it would not fit."""
    loads, gate = list[int](), threading.Event()

    def load() -> LocalDraws:
        loads.append(1)
        gate.wait(60)
        return LocalDraws(*load_policy(models[0].folder), rows=512)

    base = BaseRewards(load, served[0].scores, 9, Sampling(2, seed=1))
    policy = replace(served[0], base=base)

    async def ask() -> None:
        one = Asked([], Prompt(PROMPTS[PLACE], models[0].prompt_ids[PLACE]), policy.procedure, Sampling(2))
        async with policy.working():
            first = asyncio.create_task(base.quantile(one, 0.5))
            while not loads:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            second = asyncio.create_task(base.quantile(one, 0.5))
            for _ in range(9):  # it has begun
                await asyncio.sleep(0)
            gate.set()
            _, drawn = await second
            assert len(drawn) == 9

    asyncio.run(ask())
    assert len(loads) == 1


@pytest.mark.parametrize(
    ("procedure", "near"),
    [
        ("best-of-4", "best-of-2"),
        ("2nd-best-of-5", "best-of-2"),
        ("0.5*best-of-6+0.5*standard", "best-of-6"),
        ("rewind:0.7:4", "rewind:0.4:4"),
        ("rewind:0.7:2:best", "rewind:0.7:2"),
        ("majority-of-6", "standard"),
    ],
)
def test_what_is_served_has_the_exact_law(
    served: tuple[ServedPolicy, Law], models: tuple[Enumerable, Enumerable], procedure: str, near: str
) -> None:
    """The frequencies of 1000 answers fit the law of the procedure, and not that of one near to it."""
    (policy, law), (base, _) = served, models

    async def answers() -> list[Answer]:
        prompt = Prompt(PROMPTS[PLACE], base.prompt_ids[PLACE])
        async with policy.working():
            asked = [Asked([], prompt, parse_served(procedure), Sampling(2, seed=seed)) for seed in range(ANSWERS)]
            return await asyncio.gather(*map(policy.answer, asked))

    found = asyncio.run(answers())
    place = {tuple(ids): i for i, ids in enumerate(base.responses)}
    counts = np.bincount([place[answer.draws[answer.served].token_ids] for answer in found], minlength=len(place))

    def fits(name: str) -> float:
        expected = law(name) * ANSWERS
        cells = np.where(expected < 5, 0, 1 + np.arange(expected.size))  # those that are rare together
        both = [np.bincount(cells, values) for values in (counts, expected)]
        return float(chisquare(*(values[both[1] > 0] for values in both)).pvalue)

    assert fits(procedure) > 0.01
    assert fits(near) < 1e-4
