"""The real files of HH and TL;DR: what they hold, what is skipped, and the leak between train and test."""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from rows import transcript

from infalign.data.examples import load_examples
from infalign.data.files import read_rows
from infalign.data.sources import drop_groups

DATA = Path(os.environ.get("INFALIGN_DATA", Path(__file__).parents[3] / "shared" / "data"))
OFFICIAL = ["helpful-base", "harmless-base", "helpful-online", "helpful-rejection-sampled"]


@cache
def real(name):
    """Return the rows of a real file by place, its examples, and why the others were skipped."""
    path = DATA / name
    if not path.exists():
        pytest.skip("the real preference data is absent (set INFALIGN_DATA to its folder)")
    rows = dict(read_rows(path))
    return rows, *load_examples(rows.items(), skip_invalid=True)


def official():
    """Return the official HH test files."""
    return [real(f"hh/{name}/test.jsonl.gz") for name in OFFICIAL]


def test_official_counts():
    """Of the 8,552 official HH test rows all parse but 36 identical pairs, 11 empty responses and 2 bad final turns."""
    faults = Counter(reason.split(": ", 1)[1] for _, _, skipped in official() for reason in skipped)
    assert sum(len(rows) for rows, _, _ in official()) == 8552
    assert faults["the chosen and the rejected response are identical"] == 36
    assert faults["the chosen response is empty"] + faults["the rejected response is empty"] == 11
    assert faults["rejected ends with a user message"] == 2
    assert faults.total() == 49
    bad_turns = "\n".join(r for r in real("hh/helpful-online/test.jsonl.gz")[2] if "ends with a user message" in r)
    assert re.findall(r"line (\d+)", bad_turns) == ["786", "1056"]


def test_official_transcripts_reassemble():
    """Prompt and response, written as a transcript, are the official text byte for byte unless turns were merged."""
    exact = merged = 0
    for rows, examples, _ in official():
        for example in examples:
            for side in ("chosen", "rejected"):
                text = rows[example.where][side]
                if re.search(r"\n\n(Human|Assistant):((?!\n\n(Human|Assistant):).)*\n\n\1:", text, re.DOTALL):
                    merged += 1
                    continue
                turns = [turn["content"] for turn in example.prompt] + [getattr(example, side)[0]["content"]]
                exact += transcript(*turns) == text
    assert (exact, merged) == (16968, 38)


def test_the_leak_of_harmless_base():
    """2,054 harmless test rows, 2,050 of them valid, start like a train row; drop_groups removes every one."""
    test_rows, test, _ = real("hh/harmless-base/test.jsonl.gz")
    train_rows, train, _ = real("hh/harmless-base/train.recovered.jsonl.gz")

    def first_turn(row):
        return row["chosen"].split("\n\nAssistant:")[0].strip()

    starts = {first_turn(row) for row in train_rows.values()}
    assert sum(first_turn(row) in starts for row in test_rows.values()) == 2054
    groups = {example.group for example in train}
    assert sum(example.group in groups for example in test) == 2050
    kept, dropped = drop_groups(train, test)
    assert not {example.group for example in kept} & {example.group for example in test}
    assert (len(train), dropped) == (39880, 4526)


def test_tldr_files_agree():
    """All TL;DR rows parse, and 396 posts with a demonstration are prompts of the comparisons, letter for letter."""
    _, compared, not_compared = real("tldr/comparisons.validation.10000.jsonl.gz")
    _, demonstrated, not_demonstrated = real("tldr/sft.validation.1945.jsonl.gz")
    assert (len(compared), not_compared, len(demonstrated), not_demonstrated) == (10000, [], 1945, [])
    assert len({e.prompt_id for e in compared} & {e.prompt_id for e in demonstrated}) == 396
