"""Responses drawn together are those drawn alone, whoever joins and leaves between the steps."""

from typing import Any

import pytest
import torch
from tiny_models import tiny, words

from infalign.models.guided import GuidedForCausalLM
from infalign.sampling.engine import Prompt, Response, Sampling
from infalign.sampling.shared_prefix import Row, SharedPrefixBatch, SharedPrefixEngine

PROMPTS = [Prompt("long", [5, 1, 7, 2, 6, 4, 9, 8]), Prompt("short", [5, 6]), Prompt("middle", [1, 2, 9, 4])]
SAMPLING = Sampling(40, seed=3)


def guided() -> Any:
    """Return a policy whose guide moves its reference a lot."""
    model = GuidedForCausalLM.with_network(tiny(), tiny().model)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.guide.head.linear.weight, std=0.3)
    return model.eval()


MODELS = {
    "Llama": tiny,
    "GPT2": lambda: tiny("GPT2", **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "guided": guided,
}


def drawn(batch: SharedPrefixBatch, rows: list[Row]) -> list[Response]:
    """Return the responses of rows, stepping until the batch is empty."""
    while batch.rows:
        batch.step()
    return batch.responses(rows)


def assert_drawn_alone(policy: Any, found: list[Response], asked: list[tuple[int, int]]) -> None:
    """Check that responses are those that the engine draws for each prompt and index alone."""
    engine = SharedPrefixEngine(policy, words(), SAMPLING)
    expected = [engine.sample(PROMPTS[p].token_ids, PROMPTS[p].prompt_id, [index])[0] for p, index in asked]
    assert [(r.token_ids, r.text, r.finish) for r in found] == [(r.token_ids, r.text, r.finish) for r in expected]
    assert [r.logprob for r in found] == pytest.approx([r.logprob for r in expected], abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_responses_drawn_together_are_those_of_the_engine(model: str) -> None:
    """Prompts of several lengths join at different steps, some rows leave, and every other response is the same."""
    policy = MODELS[model]()
    batch = SharedPrefixBatch(policy, words())
    rows = batch.join((PROMPTS[0], index, SAMPLING) for index in [0, 1, 2])
    batch.step()
    gone = batch.join((PROMPTS[1], index, SAMPLING) for index in [7, 8])
    rows += batch.join((PROMPTS[1], index, SAMPLING) for index in [0, 5])
    batch.step()
    batch.leave(gone)
    rows += batch.join([(PROMPTS[2], 4, SAMPLING), (PROMPTS[0], 3, SAMPLING)])
    found = drawn(batch, rows)
    assert_drawn_alone(policy, found, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 5), (2, 4), (0, 3)])
    assert {"stop", "length"} == {response.finish for response in found}
    assert all(len(row.token_ids) <= 2 for row in gone)


@pytest.mark.parametrize("model", MODELS)
def test_prompts_with_equally_many_rows_share_one_product(model: str) -> None:
    """Three prompts with 4 or 3 rows each are one group, two of them as well, but not with 2 and 3 rows."""
    policy = MODELS[model]()
    batch = SharedPrefixBatch(policy, words())
    rows = batch.join((prompt, index, SAMPLING) for prompt in PROMPTS for index in range(4))
    groups = [batch._cache.counts]
    for gone in ([3, 7, 11], [0, 1, 2], [6]):
        batch.leave([rows[place] for place in gone])
        batch._compact()
        groups.append(batch._cache.counts)
    assert groups == [[12], [9], [6], [2, 3]]
    kept = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert_drawn_alone(policy, drawn(batch, [rows[4 * prompt + index] for prompt, index in kept]), kept)


def test_rows_may_have_different_lengths() -> None:
    """A shorter limit cuts the same response."""
    batch = SharedPrefixBatch(tiny(), words())
    rows = batch.join((PROMPTS[0], 0, Sampling(limit, seed=3)) for limit in (40, 4, 1))
    whole, four, one = (response.token_ids for response in drawn(batch, rows))
    assert (four, one) == (whole[:4], whole[:1])
