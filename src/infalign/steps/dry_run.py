"""What a run would do and what it would cost, with every check that does not load weights."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from infalign.core.display import counted, duration, heading, listed_names, plain_table, say
from infalign.core.errors import ConfigError
from infalign.core.http import api_key, within
from infalign.core.progress import ProgressDisplay
from infalign.data.examples import Example
from infalign.data.sources import Source, read_examples
from infalign.method.procedures import Standard
from infalign.models.gguf import gguf_file, is_gguf
from infalign.models.pretrained import check_causal, check_ends, load_tokenizer
from infalign.models.settings import is_hub_id
from infalign.pipeline.ownership import check_inputs, check_run_dir
from infalign.pipeline.pending import pending, reasons
from infalign.pipeline.records import records
from infalign.pipeline.units import Unit, follows
from infalign.recipe.fingerprints import Digests
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.findings import fewer_prompts
from infalign.rewards.classifier import check_classifier
from infalign.rewards.function import function_reward
from infalign.steps import STAGES
from infalign.steps.cost import Cost, cost, makespan, stand_in, texts_of
from infalign.steps.material import networks
from infalign.steps.passes import Architecture, Aside, Texts, UnknownSizeError
from infalign.steps.rank_model import rank_architecture
from infalign.steps.run import Run
from infalign.steps.states import read_by
from infalign.steps.train import coarse_ranks
from infalign.steps.whole_run import units
from infalign.training.solvers.base import Offline

if TYPE_CHECKING:
    from infalign.steps.probe import Probe

CONNECT_SECONDS = 3.0
LENGTHS, SPEEDS = "lengths of texts", "speeds of models"  # what is measured
LOOPS = 1.4  # times what passes take by themselves: loops, texts, files, jobs beside (docs/log/dry-run.md)
OTHERWISE = 20.0  # seconds of a run in which no model works: libraries, data, figures
MEASURED = 0.7, 1.5  # finished runs took between these multiples of the estimate (docs/log/dry-run.md)
ASSUMED = 0.5, 3.0  # where speed is told by FLOPs, which no run has checked
ROW_BYTES = 100  # per response besides its tokens: prompt id, index, log-probability
TOKEN_BYTES = 8  # per token in a table: its id and its text
WEIGHT_BYTES = 4
LIKELY_BYTES = 8  # per token that is told apart: its id and its log-probability
CHECKPOINT_BYTES = 3 * WEIGHT_BYTES  # per parameter: the weight and Adam's two moments


def print_plan(recipe: Recipe, console: Console, wanted: Callable[[Run], list[Unit]] = units) -> None:
    """Check what can be checked without loading weights, then print what a run would do and its cost.

    ``wanted`` gives the units that are to be done, by default those of all stages. Nothing is written.

    Raises DataError for data that cannot be read, ConfigError for a local model without a usable tokenizer, a missing
    model folder, a reward function that cannot be imported, a run directory that is no run's, or an input where an
    output goes. Hub ids are listed as not checked.
    """
    digests = Digests(Layout(Path(recipe.run_dir)).digests)
    run = Run.of(recipe, digests)
    check_run_dir(run.layout.root)
    check_inputs(digests.files, units(run))
    try:
        recipe.compute.check()
        of_machine = recipe.of_machine()
    except ConfigError as error:  # a plan may be for another machine
        of_machine = [str(error)]
    for warning in of_machine:
        say(console, f"[yellow]![/] {warning}")
    train, test, on_hub = _check_data(recipe, console)
    unchecked = [*on_hub, *_check_models(recipe)]
    for source in recipe.rewards.values():
        if source.function is not None:
            function_reward(source.function)
        _check_servers(source.url or (), source.api_key_env, console)
    _check_servers(*recipe.rollout.engine.asks, console)
    for name in unchecked:
        say(console, f"not checked: {name}")
    asked = wanted(run)
    with ProgressDisplay(console) as display:
        display.start(LENGTHS)
        tokenizer, exact = stand_in(run, train)
        texts = texts_of(run, train, test, not on_hub, tokenizer, exact)
        display.finish(LENGTHS)
        probe, begun = _probe(run, tokenizer), time.monotonic()
        costs = _costs(run, asked, texts, probe, display)
    if fewer := fewer_prompts(recipe, texts.rows):
        say(console, f"[yellow]![/] {fewer}")
    _print_work(run, asked, costs, probe, time.monotonic() - begun, console)
    _print_policies(recipe, console)
    _print_cost(run, texts, probe, console)


def _check_data(recipe: Recipe, console: Console) -> tuple[list[Example], list[Example], list[str]]:
    """Print the number of examples of every local source; return those of training, of the test, and what the hub has.

    Sources on the hub are not checked.
    """
    found: dict[str, list[Example]] = {"data.sources": [], "data.test": []}
    on_hub = list[str]()
    for where, sources in (("data.sources", recipe.data.sources), ("data.test", recipe.data.test)):
        for i, source in enumerate(sources):
            if source.hub is not None:
                on_hub.append(f"{where}.{i}: {source.hub}, split {source.split}, of the hub")
                continue
            examples, skipped = read_examples(recipe.data, [source], seed=recipe.seed)
            found[where] += examples
            pairs = sum(example.rejected is not None for example in examples)
            left_out = f", {counted(len(skipped), 'invalid row')} left out" if skipped else ""
            counts = f"{counted(pairs, 'preference pair')}, {counted(len(examples) - pairs, 'demonstration')}"
            say(console, f"{where}.{i}: {_origin(source)}: {counts}{left_out}")
    return found["data.sources"], found["data.test"], on_hub


def _check_servers(urls: Sequence[str], variable: str | None, console: Console) -> None:
    """Check the key of servers, and say if nobody listens at an address now."""
    for url in urls:
        api_key(variable)
        parts = urlsplit(url)
        address = (str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
        try:
            within(CONNECT_SECONDS, partial(socket.create_connection, address, CONNECT_SECONDS)).close()
        except OSError as error:
            say(console, f"[yellow]![/] {escape(url)} cannot be reached now ({error.strerror or error})")


def _origin(source: Source) -> str:
    if source.set is not None:
        return f"{source.set}, {source.split}"
    return source.path if source.path is not None else "the built-in world"


def _check_models(recipe: Recipe) -> Iterator[str]:
    """Check each model in a local folder, and its tokenizer; yield those of the hub or in a GGUF, which are unchecked.

    A guide's trunk needs no tokenizer.
    """
    from transformers import AutoConfig

    models = {f"{name}.model": path for name, path in recipe.named_models.items()}
    ready = {f"{name}.model" for name, source in recipe.rewards.items() if source.is_classifier and not source.trained}
    for key, path in (models | recipe.named_trunks).items():
        if is_gguf(path):
            yield f"{key}: {gguf_file(path)}, which the run converts"
        elif Path(path).is_dir():
            if key in models:
                tokenizer = load_tokenizer(
                    path, template=recipe.policy.chat_template if key == "policy.model" else None
                )
            if key == "policy.model":
                config = AutoConfig.from_pretrained(path, trust_remote_code=False)
                check_causal(config, path)
                check_ends(tokenizer, path)
                _check_context(recipe, path, config)
            elif key in ready:
                check_classifier(path)
        elif is_hub_id(path):
            yield f"{key}: {path} of the hub"
        else:
            raise ConfigError(f"{key}: there is no folder {path}; correct the path")


def _check_context(recipe: Recipe, folder: str, config: Any) -> None:
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, and the context of {folder} only {context}"
        )


def _probe(run: Run, tokenizer: Any) -> Probe:
    """Return what tells the speeds and sizes of the run's models."""
    from infalign.steps.probe import Probe

    compute = run.recipe.compute
    try:
        device = compute.torch_device()
    except ConfigError:  # a GPU that is not here, as the plan has said
        device = None
    named = {*run.recipe.named_models.values(), *run.recipe.named_trunks.values()}
    checked = {model for model in named if Path(model).is_dir()} - run.ggufs.keys()
    return Probe(device, tokenizer, compute.dtype, checked=checked, ggufs=run.ggufs)


def _costs(run: Run, wanted: Sequence[Unit], texts: Texts, probe: Probe, display: ProgressDisplay) -> dict[str, Cost]:
    """Return the cost of each unit, by name; a model's speed is measured for the first one that needs it."""
    from infalign.steps.probe import threads

    found = dict[str, Cost]()
    display.start(SPEEDS)
    with threads(run.recipe.compute.threads):
        for done, unit in enumerate(wanted):
            display.update(SPEEDS, done, len(wanted), unit.name)
            found[unit.name] = cost(unit, texts, probe)
    return found


def _print_work(
    run: Run, wanted: Sequence[Unit], costs: Mapping[str, Cost], probe: Probe, took: float, console: Console
) -> None:
    """Print what is done and what is to be done by stage, with its cost, and how long all of it takes."""
    todo, first, at_once = pending(wanted, run.layout.root), follows(wanted), run.recipe.compute.processes
    left = {name: LOOPS * costs[name].seconds * (1 - found.share) for name, found in todo.items()}
    table = plain_table("stage", "done already", "to do", "tokens", "memory", "time", breaking=[0, 1, 2])
    for stage in STAGES:
        names = [unit.name for unit in wanted if unit.stage == stage]
        missing = [name for name in names if name in todo]
        if names:
            tokens = sum(costs[name].tokens * (1 - todo[name].share) for name in missing)
            memory = sum(sorted(costs[name].memory for name in missing)[-at_once:])
            seconds = makespan({name: left[name] for name in missing}, first, at_once)
            known = (decimal(round(memory)), duration(seconds)) if seconds else ("?", "?")
            numbers = (f"{tokens:,.0f}", *known) if tokens else ()
            table.add_row(stage, " ".join(name for name in names if name not in todo), " ".join(missing), *numbers)
    _print(console, f"Work in {run.layout.root}, at most {counted(at_once, 'job')} at a time", table)
    for line in reasons(todo):
        say(console, line, markup=False)
    if any(left.values()):
        whole = OTHERWISE + makespan(left, first, at_once)
        low, high = (duration(edge * whole) for edge in (ASSUMED if probe.assumes else MEASURED))
        say(console, f"\nIn all about {duration(whole)}, {low} to {high}: {probe.how}", markup=False)
        say(console, f"(told in {took:.0f} s; without rewards that are functions or at a URL)")
    unknown: dict[str, list[str]] = {}
    for name in todo:
        if said := costs[name].unknown:
            unknown.setdefault(said, []).append(name)
    for said, names in unknown.items():
        say(console, f"[yellow]![/] not counted in {listed_names(names)}: {said}")
    if done := [name for name, found in costs.items() if name not in todo and found.seconds]:
        made = records(run.layout.root)
        took, told = sum(made[name]["seconds"] for name in done), sum(LOOPS * costs[name].seconds for name in done)
        say(console, f"The jobs that are done took {duration(took)}; the same estimate says {duration(told)}.")


def _print_policies(recipe: Recipe, console: Console) -> None:
    procedures = dict.fromkeys([Standard(), recipe.procedure])
    columns = ("policy", "trained on", "KL", "β", "trainer's\nβ")
    table = plain_table(*columns, *(f"{p.name}\n%" for p in procedures), breaking=[1])
    for name, policy in recipe.policies.items():
        law = policy.law(recipe.procedure)
        if law is None:  # raw rewards have no law before the rollouts exist; bond trains until the budget is spent
            table.add_row(name, policy.method, f"{policy.budget or math.nan:.3g}")
            continue
        wins = (f"{100 * law.win_rate(procedure):.1f}" for procedure in procedures)
        betas = (f"{beta:.3g}" for beta in (law.beta, law.beta / policy.shaping.scale))
        table.add_row(name, policy.method, f"{law.kl:.3g}", *betas, *wins)
    _print(
        console,
        "Policies: KL in nats, β for the paper's raw Φ and for the trainer's, theory's win rates at this KL",
        table,
    )
    for warning in (warning for name in recipe.policies for warning in coarse_ranks(recipe, name)):
        say(console, f"[yellow]![/] {warning}")


def _print_cost(run: Run, texts: Texts, probe: Probe, console: Console) -> None:
    recipe = run.recipe
    rollout, evaluate, tokens = recipe.rollout, recipe.evaluate, recipe.rollout.max_new_tokens
    prompts = texts.prompts(rollout.prompts, "train")
    generated = {
        "training rollouts": prompts * rollout.k,
        "evaluation": (1 + len(recipe.policies)) * texts.prompts(evaluate.prompts, "test") * evaluate.samples,
    }
    stored = sum(generated.values()) * (tokens * TOKEN_BYTES + ROW_BYTES)
    if a_prompt := sum(policy.generated_a_prompt for policy in recipe.policies.values()):
        generated["on-policy training"] = math.ceil(prompts * a_prompt)
    table = plain_table("generated", "responses", "tokens at most", breaking=[0, 1, 2])
    for purpose, responses in generated.items():
        table.add_row(purpose, f"{responses:,}", f"{responses * tokens:,}")
    _print(console, "Generation", table)
    _print_disk(run, stored, _states_bytes(run, texts, probe), probe, console)


def _print_disk(run: Run, tables: float, states: float | None, probe: Probe, console: Console) -> None:
    sizes, trained, unseen = list[int](), list[int](), 0
    for made in _made(run):
        try:
            shapes = [probe.shape(part) for part in made]
        except UnknownSizeError:
            unseen += 1
        else:
            sizes.append(sum(shape.parameters for shape in shapes))
            trained.append(shapes[-1].trained)
    checkpoints = 2 * CHECKPOINT_BYTES * sum(sorted(trained)[-run.recipe.compute.processes :])  # the best and the last
    found = {"tables": tables, "states of the reference": states, "models": WEIGHT_BYTES * sum(sizes)}
    found["checkpoints while training"] = checkpoints
    known = ", ".join(f"{name} {decimal(round(size))}" for name, size in found.items() if size)
    unknown = [counted(unseen, "model")] * bool(unseen) + ["states of the reference"] * (states is None)
    beside = f"; and {' and '.join(unknown)} of unknown size" if unknown else ""
    say(console, f"\nDisk, at most: {known}{beside}")


def _made(run: Run) -> Iterator[Sequence[Architecture]]:
    """Yield for each model that the run trains what it is made of, what it trains last."""
    recipe = run.recipe
    if recipe.policy.fit is not None:
        yield [run.architecture("policy")]
    yield from ([run.architecture(name)] for name, source in recipe.rewards.items() if source.trained)
    if recipe.rank_model is not None:
        yield [rank_architecture(run)]
    for name, policy in recipe.policies.items():
        *reference, own = networks(run, name)
        with_its_own = isinstance(policy, Offline) and policy.guide is not None and policy.guide.lora is None
        yield [*reference, own] if with_its_own and not isinstance(own, Aside) else [own]


def _states_bytes(run: Run, texts: Texts, probe: Probe) -> float | None:
    """Return the bytes, at most, of the reference's states and likely tokens that trainings read; None if unknown."""
    rollout, found = run.recipe.rollout, 0.0
    prompts, number = texts.prompts(rollout.prompts, "train"), 2 if run.recipe.compute.dtype == "bfloat16" else 4
    drawn = prompts * rollout.k * rollout.max_new_tokens
    for which in {which for policy in run.recipe.policies.values() for which in read_by(policy)}:
        try:
            width = max(1, which.evenly) * probe.shape(run.architecture("policy")).width
        except UnknownSizeError:
            return None
        found += (prompts * run.recipe.data.max_prompt_tokens + drawn) * width * number
        found += drawn * which.likely * LIKELY_BYTES
    return found


def _print(console: Console, title: str, table: Table) -> None:
    heading(console, title)
    console.print(table)
