"""The text world: what the author writes, what the judge measures, and what the labels reveal."""

import json
import math
from functools import partial
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import assistant, user

from infalign import world
from infalign.core.errors import DataError
from infalign.world import dialogues, gold, preferences

PHRASES = sorted(world._REPLY_PHRASES | world._REQUEST_PHRASES)
texts = st.text() | st.lists(st.sampled_from(PHRASES) | st.text(max_size=8)).map(" ".join)


def score(request: str, *replies: str) -> list[float]:
    """Return the gold of each reply to one request."""
    return gold([[user(request)]] * len(replies), list(replies))


@pytest.mark.parametrize("sample", [dialogues, partial(preferences, temperature=1.0)], ids=["dialogues", "pairs"])
def test_seed_decides_every_text(sample):
    """A seed gives one list, of which a shorter list is the beginning; another seed gives another list."""
    assert sample(60, seed=3) == sample(60, seed=3)
    assert sample(20, seed=3) == sample(60, seed=3)[:20]
    assert sample(60, seed=3) != sample(60, seed=4)
    assert sample(0, seed=3) == []


def test_the_text_of_the_world_is_what_published_numbers_are_of():
    """Dialogues, preferences and gold of one seed, to the bit: what changes them changes all published numbers."""
    talks = dialogues(3000, seed=3)
    pairs = preferences(2000, seed=5, temperature=0.7)
    golds = [score(request, chosen, rejected) for request, chosen, rejected in pairs]
    digest = sha256(json.dumps([talks, pairs, golds]).encode()).hexdigest()
    assert digest == "f02eb86c777857c675b1bdbd7544e94403a1f376833d63a6cec949b1bf27bfd5"


def test_gold_of_one_reply_adds_up_by_hand():
    """The gold of a short reply is the sum that the tables say, scaled and shifted by its topic."""
    request = "I have little time. How do I grow a garden?"
    reply = "Hello and thank you for asking. Water the roots early in the morning. Also mix old leaves into the soil."
    tips = 1.23 + 0.61 * (1.23 - (1.23 - 0.67) / 6)
    assert score(request, reply) == pytest.approx([0.5 + 1.3 * (0.83 + tips - 0.64)])
    assert score(request, "zebra") == pytest.approx([0.5 + 1.3 * (-0.83 - 0.64 - 0.11)])
    assert score("Tell me a joke.", reply) == pytest.approx([0.83])


@given(st.lists(st.tuples(texts, texts), max_size=4))
def test_gold_is_total_and_scores_each_reply_alone(rows):
    """Any text has a finite gold, the same in every batch and every order of the batch."""
    prompts = [[user(request)] for request, _ in rows]
    replies = [reply for _, reply in rows]
    scores = gold(prompts, replies)
    assert all(map(math.isfinite, scores))
    assert gold(prompts[::-1], replies[::-1]) == scores[::-1]
    assert [score(request, reply)[0] for request, reply in rows] == scores


def test_last_user_turn_is_the_request():
    """Gold reads the last user turn and nothing else of the conversation."""
    turns = [user("How do I bake bread?"), assistant("Weigh the flour on a scale."), user("How do I move house?")]
    reply = "Pack one room at a time."
    assert gold([turns], [reply]) == score("How do I move house?", reply) != score("How do I bake bread?", reply)


def test_bad_settings_and_data_are_named():
    """A missing response and a missing request are errors."""
    with pytest.raises(DataError, match="1 prompts but 0 responses"):
        gold([[user("How do I bake bread?")]], [])
    with pytest.raises(DataError, match="prompt 0 has no user turn"):
        gold([[{"role": "system", "content": "Be kind."}]], ["Okay."])
