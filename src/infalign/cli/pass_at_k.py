"""The command that measures pass@k on tables of rewards from any source, and compares models."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson, new_file
from infalign.cli.output import open_console, print_json
from infalign.core.errors import ConfigError

PASS_AT_K_EPILOGUE = """\
Examples:
  infalign pass-at-k samples.csv
  infalign pass-at-k samples.parquet --metric pass@1 --metric pass@64 --metric maj@8
  infalign pass-at-k a.jsonl b.jsonl --columns prompt=problem,reward=score
  infalign pass-at-k graded.jsonl --threshold 0.99 --json
  infalign pass-at-k runs.csv --plot pass-at-k.html

A row is one response with prompt_id, reward (1 right, 0 wrong, or graded) and,
if there are several, model; answer for maj@k. Metrics are means over all sets
of k responses per prompt, so they are unbiased. pass@k: at least one of k is
right; pass^k: all are; maj@k: the most frequent answer is; avg@k, best-of-k and
worst-of-k: the mean reward. Models are compared on the prompts that they share.
"""


def pass_at_k(
    *tables: Annotated[Path, Parameter(help="Tables (.parquet, .csv, .jsonl), logs, or folders of logs.")],
    metric: Annotated[list[str], Parameter(help="pass@8, pass^4, maj@5, avg@16, best-of-4. Repeatable.")] | None = None,
    columns: Annotated[str, Parameter(help="Which column is what: prompt=problem,reward=score_*,model=name.")] = "",
    score: Annotated[str | None, Parameter(help="Which of several scorers or metrics of a log.")] = None,
    check: Annotated[str | None, Parameter(help="Score the texts of a log by my_checker.py:check.")] = None,
    by: Annotated[str | None, Parameter(help="Measure the values of this column apart.")] = None,
    against: Annotated[str | None, Parameter(help="Compare with this model only.")] = None,
    threshold: Annotated[float | None, Parameter(help="A response with at least this reward is right.")] = None,
    missing: Annotated[
        Literal["refuse", "omit", "wrong"], Parameter(help="What to do with samples without a reward.")
    ] = "refuse",
    plot: Annotated[Path | None, Parameter(help="Write a figure, .png or .svg, or a page, .html.")] = None,
    confidence: Annotated[float, Parameter(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of the bootstrap.", validator=Number(gte=0))] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure pass@k, pass^k and majority votes, and compare models."""
    from infalign.evaluation.intervals import Confidence
    from infalign.evaluation.measures import Measuring, measure, over_k, paired_differences
    from infalign.evaluation.table_files import Reading
    from infalign.integrations.logs import read_rewards
    from infalign.report.measured import ENDINGS, print_measured, write_measured
    from infalign.rewards.function import import_function

    if not tables:
        raise ConfigError("give one or more tables: infalign pass-at-k samples.csv")
    file = None if plot is None else new_file(plot, *ENDINGS)
    chosen = dict(choice.partition("=")[::2] for choice in columns.split(",") if choice)
    reading = Reading(chosen, [by] if by else [], missing)
    checker = None if check is None else import_function(check)
    table = read_rewards(*tables, score=score, check=checker, reading=reading)
    how = Measuring(threshold, by, Confidence(confidence, seed))

    def found_of(metrics: list[str]) -> dict[str, object]:
        apart = paired_differences(table, metrics, how, against=against) if len(table.models.names) > 1 else []
        return {"metrics": measure(table, metrics, how), "differences": apart}

    metrics = list(dict.fromkeys(metric or over_k(table)))
    found = {"source": table.source, "confidence": confidence, **found_of(metrics), "notes": list(table.notes)}
    if file is not None:
        write_measured(found, found_of(over_k(table, metrics[0].rstrip("0123456789"))), file)
    if as_json:
        print_json(found)
    else:
        print_measured(found, open_console())
