"""A run's calibrated prompts in the form of another trainer, and how to start that trainer on them.

A framework's adapter has ``row``, a row of calibrated.parquet in its form, and ``command``, the words that start it.
"""

from importlib import import_module
from pathlib import Path

import pyarrow as pa

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import read_table, write_table
from infalign.data.messages import prompts_of
from infalign.pipeline.pending import changes
from infalign.pipeline.records import records
from infalign.recipe.stored_laws import reference_rewards
from infalign.training.solvers.base import read_aim


def export(run: Path, framework: str, *, transform: str, kl: float) -> tuple[Path, str, list[str]]:
    """Write ``run``/export/FRAMEWORK/train.parquet; return it, the transformation, and the command.

    The command spends ``kl`` nats per response. ``optimal`` becomes the optimum for the run's procedure on its rewards.
    Raises ConfigError for a transformation that cannot spend the budget on the stored rewards, and for a reference
    whose folder lacks the run's chat template; DataError if the run is not calibrated, or with other models than it
    has now.
    """
    from infalign.models.tokenizers import prints_date
    from infalign.steps.run import Run
    from infalign.steps.status import recorded_recipe
    from infalign.steps.whole_run import check_opened, units

    this = Run.of(recorded_recipe(run))
    policy = this.recipe.policy
    dated = Path(this.reference).is_dir() and prints_date(this.reference)
    if policy.fit is None and (policy.chat_template is not None or dated):
        raise ConfigError(
            f"{this.reference} lacks the {'day' if dated else 'chat template'} of the run, which a trainer needs; "
            f"save the tokenizer of {this.layout.tokenizer} in a copy of the folder, and start the run from the copy"
        )
    check_opened(this, this.layout.data, this.layout.calibrated, this.reference, *this.reward_inputs("reward"))
    made = records(run)
    for unit in units(this, until="score"):
        if unit.name in made and unit.stage in ("rollout", "score"):
            for change in changes(made[unit.name]["settings"], unit.settings):
                raise DataError(f"{this.layout.calibrated} was made before a change: {change}; rerun the recipe")
    table = read_table(this.layout.calibrated, ["prompt", "prompt_id", "reference_rewards", "columns"])
    path = run / "export" / framework / "train.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    adapter = import_module(f"infalign.integrations.{framework}")
    rows = [row | {"prompt": prompt} for row, prompt in zip(table.to_pylist(), prompts_of(table), strict=True)]
    try:
        exported = pa.Table.from_pylist([adapter.row(row) | {"columns": row["columns"]} for row in rows])
    except pa.ArrowException as error:
        raise DataError(
            f"{this.layout.calibrated}: the rows make no table for {framework}, as a column of the data has values of "
            f"several types ({error}); give it one, such as text, and rerun the recipe"
        ) from error
    write_table(path, exported)
    law = read_aim(transform).at(this.recipe.procedure, kl, None).law(reference_rewards(this.layout))
    lengths = {
        "max_prompt_tokens": this.recipe.data.max_prompt_tokens,
        "max_new_tokens": this.recipe.rollout.max_new_tokens,
    }
    words: list[str] = adapter.command(this.reference, str(path), beta=law.beta, **lengths)
    return path, law.shaping.name, words
