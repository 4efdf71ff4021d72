"""The commands that measure win rates and pass@k on tables of rewards from any source."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson, BaseName, new_file, open_console, print_json
from infalign.core.errors import ConfigError

WIN_RATE_EPILOGUE = """\
Examples:
  infalign win-rate --policy p.parquet --base b.parquet --procedure best-of-4
  infalign win-rate --policy p.csv --base b.csv --procedure standard \\
    --procedure best-of-8 --procedure worst-of-8 --json

A row is one sampled response: prompt_id, reward, and optionally judge_reward
(decides who wins, while reward selects) and length in tokens (adds the win rate
at equal length). All samples are used for every N, ties count half, intervals
are over prompts. Base samples must not be those used for calibration.
"""
PASS_EPILOGUE = """\
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
Columns = Annotated[str, Parameter(help="Which column is what: prompt=problem,reward=score_*,model=name.")]
Missing = Annotated[Literal["refuse", "omit", "wrong"], Parameter(help="What to do with samples without a reward.")]


def win_rate(
    *,
    policy: Annotated[Path, Parameter(help="The policy's table: FILE.parquet, .csv, .jsonl.")],
    base: Annotated[Path, Parameter(help="The base policy's table.")],
    procedure: Annotated[list[str], Parameter(help="standard, best-of-4, worst-of-4, rewind:0.85:32, ... Repeatable.")],
    base_procedure: BaseName = None,
    common_prompts: Annotated[bool, Parameter(help="Leave out prompts of only one table.")] = False,
    columns: Columns = "",
    missing: Missing = "refuse",
    confidence: Annotated[float, Parameter(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of the bootstrap.", validator=Number(gte=0))] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure inference-time win rates on two tables of rewards."""
    from infalign.evaluation.table_files import Reading, read_reward_table
    from infalign.evaluation.tables import compare_tables, pair, print_comparison

    ours, theirs = (read_reward_table(path, Reading(_read_columns(columns), (), missing)) for path in (policy, base))
    pairing = pair(ours, theirs, common_prompts=common_prompts, seed=seed)
    records = compare_tables(pairing, procedure, base_procedure=base_procedure, confidence=confidence, seed=seed)
    if as_json:
        print_json(records if len(records) > 1 else records[0])
    else:
        print_comparison(records, open_console())


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
    reading = Reading(_read_columns(columns), [name for name in (by, cluster) if name], missing)
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


def _read_columns(columns: str) -> dict[str, str]:
    """Return the column that ``--columns`` names for each role."""
    choices = [choice.partition("=")[::2] for choice in columns.split(",") if choice]
    if len(chosen := dict(choices)) < len(choices):
        raise ConfigError(f"--columns names a role twice: {columns}; several columns are a pattern, reward=sample_*")
    return chosen
