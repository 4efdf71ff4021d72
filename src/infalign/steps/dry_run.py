"""What a run would do and what it would cost, with every check that does not load weights."""

import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console

from infalign.core.display import counted, duration, heading, plain_table, say, warn
from infalign.core.errors import ConfigError, DataError
from infalign.core.spelling import listed_names
from infalign.core.user_code import function_name
from infalign.data.examples import Example
from infalign.data.messages import to_text
from infalign.method.procedures import Standard
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.ownership import check_inputs, check_run_dir
from infalign.pipeline.pending import pending, reasons
from infalign.pipeline.records import records
from infalign.pipeline.units import Unit
from infalign.recipe.settings import Recipe
from infalign.report.findings import fewer_prompts
from infalign.rewards.settings import RewardSource
from infalign.rewards.sources import check_columns, function_reward, score_examples
from infalign.steps.checks import check_setup
from infalign.steps.data import check_prompts, training_example
from infalign.steps.run import Run
from infalign.steps.time_estimate import Counts, Sampled, UnknownSizeError, count, has_gpu, job_speed, read_sample
from infalign.steps.train import coarse_ranks
from infalign.steps.whole_run import units

CONNECT_SECONDS = 3.0
MAX_SHOWN = 4000  # characters of an example
SCORED = 200  # responses of the data
UNIT_SECONDS = 1.0  # of each unit, whatever it computes: libraries, models and files are loaded
BY_RECORDS, BY_PRODUCT = 1.5, 3.0  # factors by which an estimate may be too low or too high


def print_plan(recipe: Recipe, console: Console, wanted: Callable[[Run], list[Unit]] = units) -> None:
    """Check what can be checked without loading weights, then print what a run would do and its cost.

    ``wanted`` gives the units that are to be done, by default those of all stages. Nothing is written. Raises DataError
    for data that cannot be read, ConfigError for a model folder that is missing or has no usable tokenizer, a reward
    function that cannot be imported, a run directory that is no run's, or an input where an output goes. Hub ids are
    listed as not checked.
    """
    if (minutes := recipe.rollout.minutes) is not None:
        say(console, f"rollout.prompts: {recipe.rollout.prompts:,}, whose rollouts take {minutes:g} minutes at most")
    run = Run.of(recipe)
    check_run_dir(run.layout.root)
    check_inputs(run.digests.files, units(run))
    for warning in _machine_warnings(recipe):
        warn(console, warning)
    unchecked, counts, examples = _count_data(run, console)
    unchecked += check_setup(recipe)
    check_columns([function_reward(s.function) for s in recipe.rewards.values() if s.function], examples)
    for name in ("train", "test") if counts.rows else ():
        there, too_long = counts.rows[f"{name}_prompts"], counts.rows[f"{name}_prompts_too_long"]
        check_prompts(name, there and there + too_long, recipe.data.max_prompt_tokens)  # by estimated lengths
    _check_rows(wanted(run), counts.rows)
    for url in filter(None, (recipe.rollout.engine.server[0], *(source.url for source in recipe.rewards.values()))):
        _check_server(url, console)
    for name in unchecked:
        say(console, f"not checked: {name}")
    _print_example(run, examples, console)
    _print_reward(recipe.reward, examples, console)
    if fewer := fewer_prompts(recipe, counts.rows):
        warn(console, fewer)
    _print_work(run, wanted(run), counts, console)
    _print_policies(recipe, console)


def _machine_warnings(recipe: Recipe) -> list[str]:
    """Return warnings about the machine, and what it lacks: a plan may be for another one."""
    if recipe.compute.device == "cuda" and not has_gpu():
        return ["compute.device is cuda, but this machine has no GPU; use auto or cpu, or fix the driver"]
    try:
        recipe.compute.check()
        return recipe.machine_warnings()
    except ConfigError as error:
        return [str(error)]


def _count_data(run: Run, console: Console) -> tuple[list[str], Counts, list[Example]]:
    """Print the number of examples of every local source; return the sources of the hub, all counts and examples."""
    data, on_hub, read = run.recipe.data, list[str](), dict[str, list[Sampled]]()
    for where, sources in (("data.sources", data.sources), ("data.test", data.test)):
        read[where] = []
        for i, source in enumerate(sources):
            if source.hub is not None and not source.hub.found_in(data.folder).is_local:
                on_hub.append(f"{where}.{i}: {source.hub.id}, split {source.hub.split}, of the hub")
                continue
            some = read_sample(run, source)
            read[where].append(some)
            pairs = round(some.weight * sum(example.rejected is not None for example in some.examples))
            alone = round(some.weight * sum(not example.chosen for example in some.examples))
            others, skipped = round(some.weight * len(some.examples)) - pairs - alone, round(some.weight * some.skipped)
            kinds = {"preference pair": pairs, "demonstration": others, "prompt": alone, "invalid row": skipped}
            more = {"prompt": " alone", "invalid row": " left out"}
            counts = ", ".join(counted(number, kind) + more.get(kind, "") for kind, number in kinds.items() if number)
            if columns := sorted({name for example in some.examples for name in example.columns}):
                counts += f"; other columns: {listed_names(columns, 12)}"
            built_in = source.reasoning_gym or f"the built-in {'world' if source.world else 'arithmetic'}"
            named = source.path or (source.hub and f"{source.hub.id}, {source.hub.split}") or built_in
            say(console, f"{where}.{i}: {named}: {counts}")
    examples = [example for some in read["data.sources"] for example in some.examples]
    return on_hub, count(run, *read.values(), whole=not on_hub), examples


def _check_rows(units: Sequence[Unit], rows: Mapping[str, int]) -> None:
    """Raise DataError for a unit that trains on a table without rows."""
    for unit in units:
        if empty := [made.table.replace("_", " ") for made in unit.passes if rows.get(made.table) == 0]:
            key = "policy.fit" if unit.stage == "sft" else f"{unit.name}.fit"
            raise DataError(f"{key} needs {empty[0]}, but the data has none; add rows with responses, or leave it out")


def _check_server(url: str, console: Console) -> None:
    """Say if nobody listens at the address of a server now."""
    parts = urlsplit(url)
    address = (str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        warn(console, f"cannot reach {url} now ({error.strerror or error})")


def _print_example(run: Run, examples: Sequence[Example], console: Console) -> None:
    """Print an example as the policy reads it, if its tokenizer is here."""
    policy = run.recipe.policy
    answered = sorted((e for e in examples if e.chosen), key=lambda e: e.rejected is not None)
    if not answered or policy.model is None or not Path(policy.model).is_dir():
        return
    tokenizer = load_tokenizer(policy.model, template=policy.chat_template, date=run.date)
    try:
        shown = training_example(tokenizer, answered[0])
    except DataError as error:
        warn(console, f"{answered[0].where}: {error}")
        return
    heading(console, f"An example as the policy reads it: {shown['where']}, {', '.join(shown['roles'])}")
    text = "".join(f"⟦{part}⟧" if trained else part for part, trained in shown["parts"])
    say(console, f"{text[:MAX_SHOWN]}{' …' if len(text) > MAX_SHOWN else ''}")
    say(console, "Fine-tuning trains on the text between ⟦ and ⟧.")


def _print_reward(reward: RewardSource, examples: Sequence[Example], console: Console) -> None:
    """Print what a reward function gives to responses of the data, which fine-tuning learns to repeat."""
    answered = [example for example in examples if example.chosen]
    some = answered[:: max(1, len(answered) // SCORED)][:SCORED]
    if reward.function is None or not some:
        return
    name, function = function_name(reward.function), function_reward(reward.function, reward.time_limit)
    given = score_examples(function, name, some, [to_text(example.chosen) for example in some])
    say(console, f"{name} gives {np.nanmean(given):.3g} on average to {len(some)} responses of the data")


def _print_work(run: Run, wanted: Sequence[Unit], counts: Counts, console: Console) -> None:
    """Print what is done and what is to be done by stage, with its time, and how long all of it takes."""
    todo, at_once = pending(wanted, run.layout.root), run.recipe.compute.processes
    flops, unknown = dict[str, float](), dict[str, list[str]]()
    for unit in wanted:
        try:
            flops[unit.name] = sum(map(counts.flops, unit.passes))
        except UnknownSizeError as error:
            flops[unit.name] = 0.0
            unknown.setdefault(str(error), []).extend([unit.name] if unit.name in todo else [])
    seconds, how = _seconds(run, flops, todo)
    table = plain_table("stage", "already done", "to do", "time", breaking=[0, 1, 2])
    whole = 0.0
    for stage in dict.fromkeys(unit.stage for unit in wanted):
        names = [unit.name for unit in wanted if unit.stage == stage]
        missing = [name for name in names if name in todo]
        left = [seconds[name] * (1 - todo[name].share) for name in missing]
        took = max([sum(left) / at_once, *left])
        whole += took
        shown = duration(took) if any(flops[name] for name in missing) else ""
        table.add_row(stage, " ".join(name for name in names if name not in todo), " ".join(missing), shown)
    heading(console, f"Work in {run.layout.root}, at most {counted(at_once, 'job')} at once")
    console.print(table)
    for line in reasons(todo):
        say(console, line)
    if any(flops[name] for name in todo):
        say(console, f"\nAbout {duration(whole)} in total, without rewards that are functions or at a URL ({how})")
    for said, names in unknown.items():
        if names:
            warn(console, f"no time estimate for {listed_names(names)}: {said}")


def _seconds(run: Run, flops: Mapping[str, float], todo: Collection[str]) -> tuple[dict[str, float], str]:
    """Return the seconds of each unit, and how they were found, with the factor by which they may be wrong.

    A record of what is to be done again is of other work.
    """
    found = records(run.layout.root)
    made = {name: found[name]["seconds"] for name in found.keys() & flops.keys() - todo}
    if done := sum(flops[name] for name in made):
        speed, factor = done / sum(made[name] for name in made if flops[name]), BY_RECORDS
        how = f"from the recorded time of {counted(len(made), 'step')}"
    else:
        (speed, machine), factor = job_speed(run.recipe.compute), BY_PRODUCT
        how = f"from {sum(flops.values()):.1e} FLOPs on {machine}"
    seconds = {name: made.get(name, UNIT_SECONDS + one / speed) for name, one in flops.items()}
    return seconds, f"{how}; accurate to a factor of {factor:g}"


def _print_policies(recipe: Recipe, console: Console) -> None:
    aims = {name: policy.aim(recipe.procedure) for name, policy in recipe.policies.items()}
    laws = {name: aim.rank_law() for name, aim in aims.items() if aim is not None}
    procedures = dict.fromkeys([Standard(), recipe.procedure]) if any(laws.values()) else ()
    known = ("β", *(f"{p.name}\n%" for p in procedures)) if procedures else ()
    table = plain_table("policy", "trained on", "KL", *known, breaking=[1])
    for name, policy in recipe.policies.items():
        aim, law = aims[name], laws.get(name)
        if aim is None or law is None:  # raw rewards have none before the rollouts exist; bond trains to the budget
            table.add_row(name, policy.method, f"{policy.budget or math.nan:.3g}")
            continue
        scale = aim.transform.scale if aim.transform else 1.0
        wins = (f"{100 * law.win_rate(procedure):.1f}" for procedure in procedures)
        table.add_row(name, policy.method, f"{law.kl:.3g}", f"{law.beta / scale:.3g}", *wins)
    said = ", the trainer's β, theoretical win rates at this KL" if procedures else ""
    heading(console, f"Policies: KL in nats{said}")
    console.print(table)
    for name in recipe.policies:
        for warning in coarse_ranks(recipe, name):
            warn(console, warning)
