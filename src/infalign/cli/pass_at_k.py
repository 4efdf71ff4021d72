"""The command that measures pass@k on a table of rewards from any source."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson
from infalign.cli.output import open_console, print_json

PASS_AT_K_EPILOGUE = """\
Examples:
  infalign pass-at-k samples.csv
  infalign pass-at-k samples.parquet --metric pass@1 --metric pass@64 --metric maj@8
  infalign pass-at-k graded.jsonl --threshold 0.99 --json

A row is one response with prompt_id, reward (1 right, 0 wrong, or graded with
--threshold), and answer for maj@k. Metrics are unbiased: means over all sets of
k responses per prompt. pass@k: at least one of k is right; pass^k: all are;
maj@k: the most frequent answer is; avg@k: the mean.
"""


def pass_at_k(
    table: Annotated[Path, Parameter(help="FILE.parquet, .csv or .jsonl.")],
    *,
    metric: Annotated[list[str], Parameter(help="pass@8, pass^4, maj@5, avg@16. Repeatable.")] | None = None,
    threshold: Annotated[float | None, Parameter(help="A response with at least this reward is right.")] = None,
    confidence: Annotated[float, Parameter(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of the bootstrap.", validator=Number(gte=0))] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure pass@k, pass^k and majority votes on a table of responses."""
    from infalign.evaluation.pass_at_k import measure_table, print_metrics

    found = measure_table(table, metric, threshold=threshold, confidence=confidence, seed=seed)
    if as_json:
        print_json(found)
    else:
        print_metrics(found, open_console())
