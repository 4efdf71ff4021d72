"""The text world: what the author writes, what the judge measures, and what the labels reveal."""

import json
import math
import random
import re
from hashlib import sha256
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from infalign import world
from infalign.core.errors import ConfigError, DataError
from infalign.world import dialogues, gold, preferences

TEMPERATURE = 1.0
PHRASES = sorted(world._REPLY_PHRASES | world._REQUEST_PHRASES)
texts = st.text() | st.lists(st.sampled_from(PHRASES) | st.text(max_size=8)).map(" ".join)


def score(request: str, *replies: str) -> list[float]:
    """Return the gold of each reply to one request."""
    return gold([[{"role": "user", "content": request}]] * len(replies), list(replies))


def author_pairs(n: int, seed: int) -> list[tuple[str, str, str]]:
    """Return ``n`` requests, each with the replies of two independent authors, equal replies kept."""
    rng = random.Random(seed)
    asked = [world._request(rng) for _ in range(n)]
    return [(text, *(world._reply(topic, need, rng.random(), rng) for _ in range(2))) for text, topic, need in asked]


def swap_tips(reply: str, tips: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the reply with each of ``tips`` replaced by one of ``others``, in lower case."""
    swap = dict(zip(tips, cycle(others), strict=False))
    return re.sub("|".join(swap), lambda match: swap[match[0]], reply.lower())


@pytest.mark.parametrize(
    "sample",
    [dialogues, lambda n, seed: preferences(n, seed=seed, temperature=TEMPERATURE)],
    ids=["dialogues", "pairs"],
)
def test_seed_decides_every_text(sample):
    """A seed gives one list, of which a shorter list is the beginning; another seed gives another list."""
    assert sample(60, seed=3) == sample(60, seed=3)
    assert sample(20, seed=3) == sample(60, seed=3)[:20]
    assert sample(60, seed=3) != sample(60, seed=4)
    assert sample(0, seed=3) == []


def test_the_text_of_the_world_is_what_published_numbers_are_of():
    """Dialogues, preferences and gold of one seed, to the bit: what changes them changes all numbers of the demo."""
    talks = [(row.request, row.reply) for row in dialogues(3000, seed=3)]
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
    prompts = [[{"role": "user", "content": request}] for request, _ in rows]
    replies = [reply for _, reply in rows]
    scores = gold(prompts, replies)
    assert all(map(math.isfinite, scores))
    assert gold(prompts[::-1], replies[::-1]) == scores[::-1]
    assert [score(request, reply)[0] for request, reply in rows] == scores


def test_last_user_turn_is_the_request():
    """Gold reads the last user turn and nothing else of the conversation."""
    turns = [
        {"role": "user", "content": "How do I bake bread?"},
        {"role": "assistant", "content": "Weigh the flour on a scale."},
        {"role": "user", "content": "How do I move house?"},
    ]
    reply = "Pack one room at a time."
    assert gold([turns], [reply]) == score("How do I move house?", reply) != score("How do I bake bread?", reply)


def test_judge_reads_every_word_that_an_author_writes():
    """Every author's reply consists of known phrases, and its request names exactly its topic and constraint."""
    rng = random.Random(0)
    for _ in range(500):
        request, topic, constraint = world._request(rng)
        asked, _ = world._find(world._words(request), world._REQUEST_PHRASES)
        assert {topic} == {world._TOPIC_OF[phrase] for phrase in asked if phrase in world._TOPIC_OF}
        named = {world._CONSTRAINT_OF[phrase] for phrase in asked if phrase in world._CONSTRAINT_OF}
        assert named == ({constraint} if constraint else set())
        _, unknown_words = world._find(world._words(world._reply(topic, constraint, rng.random(), rng)), PHRASES)
        assert unknown_words == 0


def test_texts_are_short_simple_and_varied():
    """Replies have 15–19 words on average and at most 30, requests at most 25; 900 words say it all."""
    rows = dialogues(8000, seed=0)
    lengths = np.array([len(row.reply.split()) for row in rows])
    assert 15 < lengths.mean() < 19
    assert lengths.max() <= 30
    assert max(len(row.request.split()) for row in rows) <= 25
    assert len({word for row in rows for word in world._words(f"{row.request} {row.reply}")}) <= 900
    assert len({row.request for row in rows}) >= 1500


def test_ties_and_equal_replies_are_rare():
    """Two authors of one request write the same text, and texts of the same gold, less than once in a hundred."""
    pairs = author_pairs(4000, seed=1)
    assert np.mean([first == second for _, first, second in pairs]) < 0.01
    assert np.mean([math.isclose(*score(request, *replies)) for request, *replies in pairs]) < 0.01


def test_care_moves_gold_but_does_not_decide_it():
    """For one request the rank correlation of care and gold lies between 0.6 and 0.9."""
    rng = random.Random(2)
    for _ in range(4):
        request, topic, constraint = world._request(rng)
        cares = [rng.random() for _ in range(1500)]
        golds = score(request, *(world._reply(topic, constraint, care, rng) for care in cares))
        assert 0.6 < spearmanr(cares, golds).statistic < 0.9


def test_labels_follow_bradley_terry():
    """The chosen reply has the higher gold as often as the logits predict, which is 80–85 % at temperature 1."""
    pairs = preferences(4000, seed=5, temperature=TEMPERATURE)
    assert all(chosen != rejected for _, chosen, rejected in pairs)
    margins = np.array([np.subtract(*score(request, chosen, rejected)) for request, chosen, rejected in pairs])
    expected = 1 / (1 + np.exp(-np.abs(margins) / TEMPERATURE))
    standard_error = math.sqrt(np.sum(expected * (1 - expected))) / len(pairs)
    agreement = np.mean(margins > 0)
    assert agreement == pytest.approx(expected.mean(), abs=3 * standard_error)
    assert 0.8 < agreement < 0.85


def test_tips_of_another_topic_lose():
    """Gold falls whenever the on-topic tips of a reply are replaced by another topic's."""
    rng = random.Random(7)
    swapped_replies = 0
    for row in dialogues(600, seed=7):
        topic = next(topic for topic in world._TOPICS if topic.do in row.request or topic.doing in row.request)
        other = rng.choice([other for other in world._TOPICS if other is not topic])
        swapped = swap_tips(row.reply, topic.tips, other.tips)
        if swapped != row.reply.lower():
            swapped_replies += 1
            before, after = score(row.request, row.reply, swapped)
            assert after < before
    assert swapped_replies > 300


@pytest.mark.parametrize(
    "worse",
    [
        "That is a great question. This fits into a busy day. Weigh the flour on",
        "That is a great question. Weigh the flour on a scale.",
        "That is a great question. This fits into a busy day. Weigh the flour on a scale. Weigh the flour on a scale.",
        "That is a great question. This fits into a busy day. Weigh the flour on a scale. Not my problem.",
        "That is a great question. This fits into a busy day. Weigh the flour on a scale. Stop if it hurts.",
        "That is a great question. This fits into a busy day. Weigh the flour on a scale. Pack one room at a time.",
        "",
    ],
    ids=["truncated", "constraint ignored", "repeated tip", "rude", "wrong constraint", "off topic", "empty"],
)
def test_each_fault_costs(worse):
    """A reply with a fault scores below the plain good reply."""
    good = "That is a great question. This fits into a busy day. Weigh the flour on a scale."
    high, low = score("I have little time. How do I bake bread?", good, worse)
    assert low < high


def test_length_pays_in_the_data_and_costs_beyond_it():
    """Longer authors are better, yet padding a long reply with kind words loses: where a reward model can be hacked."""
    rows = dialogues(2000, seed=8)
    topics = [next(t for t in world._TOPICS if t.do in row.request or t.doing in row.request) for row in rows]
    golds = gold([[{"role": "user", "content": row.request}] for row in rows], [row.reply for row in rows])
    qualities = [(g - topic.offset) / topic.spread for g, topic in zip(golds, topics, strict=True)]
    assert spearmanr([len(row.reply.split()) for row in rows], qualities).statistic > 0.5
    long = max(rows, key=lambda row: len(row.reply.split()))
    before, after = score(long.request, long.reply, f"{long.reply} {' '.join(world._CHEERS)}")
    assert after < before


def test_bad_settings_and_data_are_named():
    """A negative count, a temperature that is not positive, a missing response and a missing request are errors."""
    with pytest.raises(ConfigError, match="-1 dialogues"):
        dialogues(-1, seed=0)
    for temperature in (0.0, math.nan):
        with pytest.raises(ConfigError, match="temperature"):
            preferences(1, seed=0, temperature=temperature)
    with pytest.raises(DataError, match="1 prompts but 0 responses"):
        gold([[{"role": "user", "content": "How do I bake bread?"}]], [])
    with pytest.raises(DataError, match="prompt 0 has no user turn"):
        gold([[{"role": "system", "content": "Be kind."}]], ["Okay."])
