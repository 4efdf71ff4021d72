"""The command that measures win rates on tables of rewards from any source."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson, BaseName, Columns, Missing, open_console, print_json, read_columns

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
    from infalign.evaluation.pairing import pair
    from infalign.evaluation.table_files import Reading, read_reward_table
    from infalign.evaluation.tables import compare_tables, print_comparison

    ours, theirs = (read_reward_table(path, Reading(read_columns(columns), (), missing)) for path in (policy, base))
    pairing = pair(ours, theirs, common_prompts=common_prompts, seed=seed)
    records = compare_tables(pairing, procedure, base_procedure=base_procedure, confidence=confidence, seed=seed)
    if as_json:
        print_json(records if len(records) > 1 else records[0])
    else:
        print_comparison(records, open_console())
