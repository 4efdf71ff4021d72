"""The command that measures pass@k on tables of rewards from any source, and compares models."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson, Columns, Missing, new_file, open_console, print_json, read_columns
from infalign.core.errors import ConfigError

PASS_AT_K_EPILOGUE = """\
Examples:
  infalign pass-at-k logs/before.eval logs/after.eval
  infalign pass-at-k lm_eval_output --check my_checker.py:check
  infalign pass-at-k samples.parquet --metric pass@1 --metric pass@64 --metric maj@8
  infalign pass-at-k a.jsonl b.jsonl --columns prompt=problem,reward=score
  infalign pass-at-k runs.csv --plot pass-at-k.html --worth 0.05,0.1,0.2

Reads logs of inspect_ai, lm-eval, verl, TRL, verifiers, evalplus and garak, and
tables: a row is a response with prompt_id, reward (1 right, 0 wrong, or graded)
and, if there are several, model; answer for maj@k.

Metrics are means over all sets of k responses per prompt, so they are unbiased.
pass@k: at least one of k is right; pass^k: all are; maj@k: the most frequent
answer is; avg@k, best-of-k and worst-of-k: the mean reward. pass@k for more
responses than a prompt has is a model's claim, marked ≈, up to twice as many;
beyond that there are only bounds. Models are compared on the prompts that they
share. --worth: what training for pass@k on these responses could gain.
"""


def pass_at_k(
    *files: Annotated[Path, Parameter(help="Logs, folders of logs, or tables: .parquet, .csv, .jsonl.")],
    metric: Annotated[list[str], Parameter(help="pass@8, pass^4, maj@5, avg@16, best-of-4. Repeatable.")] | None = None,
    columns: Columns = "",
    score: Annotated[str | None, Parameter(help="Which of several scorers or metrics of a log.")] = None,
    check: Annotated[str | None, Parameter(help="Score the texts of a log by my_checker.py:check.")] = None,
    by: Annotated[str | None, Parameter(help="Measure the values of this column apart.")] = None,
    cluster: Annotated[str | None, Parameter(help="Prompts with one value are variants: intervals over these.")] = None,
    against: Annotated[str | None, Parameter(help="Compare with this model only.")] = None,
    threshold: Annotated[float | None, Parameter(help="A response with at least this reward is right.")] = None,
    missing: Missing = "refuse",
    worth: Annotated[str | None, Parameter(help="KL budgets in nats: what training could gain, 0.05,0.1.")] = None,
    plot: Annotated[Path | None, Parameter(help="Write a figure, .png or .svg, or a page, .html.")] = None,
    confidence: Annotated[float, Parameter(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of the bootstrap.", validator=Number(gte=0))] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure pass@k, pass^k and majority votes in logs and tables, and compare models."""
    from infalign.core.signals import end_after_signal
    from infalign.core.user_code import import_function
    from infalign.evaluation.intervals import Confidence
    from infalign.evaluation.measures import Measuring, measure_all, over_k, training_worth
    from infalign.evaluation.table_files import Reading
    from infalign.integrations.logs import read_rewards
    from infalign.report.measured import ENDINGS, print_measured, write_measured

    if not files:
        raise ConfigError("give logs or tables: infalign pass-at-k samples.csv")
    file = None if plot is None else new_file(plot, *ENDINGS)
    try:
        budgets = sorted({float(kl) for kl in worth.split(",")}) if worth is not None else []
    except ValueError as error:
        raise ConfigError(f"--worth takes KL budgets such as 0.05,0.1; found {worth!r}") from error
    reading = Reading(read_columns(columns), [name for name in (by, cluster) if name], missing)
    if check is not None:
        end_after_signal()
    checker = None if check is None else import_function(check)
    table = read_rewards(*files, score=score, check=checker, reading=reading)
    how = Measuring(threshold, by, cluster, Confidence(confidence, seed))
    metrics = list(dict.fromkeys(metric or over_k(table, how=how)))
    measured = {"source": table.source, "confidence": confidence, **measure_all(table, metrics, how, against)}
    fewest = int(table.groups().sizes.min())
    named = [int(name[5:]) for name in metric or () if name.startswith("pass@")]
    served = max((k for k in named if k <= fewest), default=min(8, fewest))
    measured["worth"] = training_worth(table, served, budgets, how) if budgets else []
    measured["notes"] = list(table.notes)
    if file is not None:
        family = over_k(table, metrics[0].rstrip("0123456789"), how)
        further = [name for name in metrics if name.startswith("pass@") and name not in family]
        write_measured(measured, measure_all(table, [*family, *further], how, against), file)
    if as_json:
        print_json(measured)
    else:
        print_measured(measured, open_console())
