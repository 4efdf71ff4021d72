"""What a dry run tells beside what a finished run took: ``python benchmarks/dry_run.py RUN_DIR``.

A row for each unit that models work in: seconds by the records, by the estimate, and their ratio; then all of them. The
records are of when the run was made, the estimate of now: a machine that is busy otherwise at one of the two shows.
"""

import sys
from pathlib import Path

from infalign.data.sources import read_examples
from infalign.pipeline.records import records
from infalign.steps.cost import cost, stand_in, texts_of
from infalign.steps.probe import Probe, threads
from infalign.steps.run import Run
from infalign.steps.status import recorded_recipe
from infalign.steps.whole_run import units


def main() -> None:
    """Print the table."""
    recipe = recorded_recipe(Path(sys.argv[1]))
    run, made = Run.of(recipe), records(Path(sys.argv[1]))
    train, _ = read_examples(recipe.data, recipe.data.sources, seed=recipe.seed)
    test, _ = read_examples(recipe.data, recipe.data.test, seed=recipe.seed)
    tokenizer, exact = stand_in(run, train)
    texts = texts_of(run, train, test, True, tokenizer, exact)
    print(texts)
    probe = Probe(recipe.compute.torch_device(), tokenizer, recipe.compute.dtype)
    took = told = 0.0
    with threads(recipe.compute.threads):
        for unit in units(run):
            found = cost(unit, texts, probe)
            if found.seconds and unit.name in made:
                seconds = made[unit.name]["seconds"]
                took, told = took + seconds, told + found.seconds
                history = made[unit.name]["summary"].get("history", [{}])
                peak = history[-1].get("train_peak_memory", 0)
                print(f"{unit.name:<28} {seconds:8.1f} {found.seconds:8.1f} {seconds / found.seconds:6.2f}   "
                      f"{peak / 2**30:.2f} {found.memory / 2**30:.2f} GiB")  # fmt: skip
    print(f"{'all':<28} {took:8.1f} {told:8.1f} {took / told:6.2f}")


if __name__ == "__main__":
    main()
