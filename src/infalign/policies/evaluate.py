"""What a policy gains over its reference on test prompts: the call."""

from collections.abc import Mapping
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infalign.core.display import amount, gain, plain_table, ratio, share
from infalign.core.errors import DataError
from infalign.core.progress import progress_line
from infalign.core.storage import column_values
from infalign.evaluation.intervals import Confidence
from infalign.evaluation.kl import rao_blackwell_kl
from infalign.evaluation.measures import Measuring, measure_all
from infalign.evaluation.reward_tables import RewardTable
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Extreme, Procedure, Standard, parse_procedure
from infalign.models.policy import AnyModel, Policy, model_name
from infalign.models.tokenizers import check_same_tokens
from infalign.policies.score import score
from infalign.rewards.sources import AnyReward
from infalign.sampling.prompts import repeated
from infalign.sampling.sample import AnyPrompts, Rollouts, prompt_rows, read_drawing, sample

KL_SAMPLES = 8  # of a prompt, at most: prompts differ so much that four times as many hardly narrow the interval


class Evaluation(dict[str, dict[str, Mapping[str, float]]]):
    """Numbers of the ``policy``, some with the ``reference`` and the paired ``difference``; printed, a table.

    Each has its mean, with ``low`` and ``high`` the ends of its 95 % interval over prompts. Win rates and pass@k are
    shares, printed as percentages.
    """

    def __str__(self) -> str:
        table = plain_table("", "policy", "reference", "difference")
        for name, estimates in self.items():
            is_share = name.startswith(("win rate", "pass"))
            of, apart = (share, gain) if is_share else (amount, ratio)
            shown = {who: (apart if who == "difference" else of)(value) for who, value in estimates.items()}
            cells = (shown.get(who, "") for who in ("policy", "reference", "difference"))
            table.add_row(f"{name}, %" if is_share else name, *cells)
        console = Console(file=StringIO(), width=120)
        console.print(table)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined, no-any-return]


def evaluate(
    policy: AnyModel,
    prompts: AnyPrompts,
    reward: AnyReward,
    procedure: Procedure | str = "standard",
    *,
    reference: AnyModel,
    samples: int = 64,
    **drawing: Any,
) -> Evaluation:
    """Return what a policy gains over its reference, both served by ``procedure``, on fresh responses.

    Models, prompts and ``drawing`` are as in `sample`, ``samples`` of each model for each prompt; the reward is as in
    `score`. Numbers are the KL to the reference in nats per response (the exact one of each token, along 8 responses
    per prompt), win rates over the reference served alike, and pass@1 and pass@N for rewards of 0 and 1, else the mean
    reward that is served.

    Raises as `sample` and `score`; ConfigError for models with different tokenizers, DataError for fewer samples than
    the procedure needs and fewer than 2 prompts.

    >>> def length(responses):
    ...     return [len(text) for text in responses]
    >>> found = evaluate(MODEL, ["Hi!", "Who?"], length, "best-of-2", reference=MODEL, samples=4, max_new_tokens=8)
    >>> list(found), found["KL, nats"]["policy"]["mean"]
    (['KL, nats', 'win rate', 'win rate as best-of-2', 'avg@1', 'best-of-2'], 0.0)
    """
    served = parse_procedure(procedure) if isinstance(procedure, str) else procedure
    models = {"policy": Policy.of(policy), "reference": Policy.of(reference)}
    tokenizer, asked, seed = models["reference"].tokenizer, prompt_rows(prompts), drawing.pop("seed", 0)
    is_local = read_drawing(drawing).engine.is_local
    check_same_tokens(models["policy"].tokenizer, tokenizer, model_name(policy))
    drawn, rewards = dict[str, Rollouts](), dict[str, Array]()
    for name, given in {"policy": policy, "reference": reference}.items():
        network = models[name].model
        source = network.name_or_path if isinstance(given, str | Path) and not is_local else network
        drawn[name] = sample((source, tokenizer), asked, samples, seed=stream_seed(seed, name), **drawing)
        rewards[name] = score(reward, drawn[name])
    kept, kept_of_reference = (~np.isnan(values).any(axis=1) for values in rewards.values())
    if not kept.any() or (kept != kept_of_reference).any():
        raise DataError(
            "the reward returned None for every prompt, or for one with the responses of one model only; return "
            "numbers, or None whatever the response"
        )
    rewards = {name: values[kept] for name, values in rewards.items()}
    intervals, ours, theirs = Confidence(seed=seed), *(Samples(values, values) for values in rewards.values())
    evaluation = Evaluation({"KL, nats": {"policy": intervals.of(_kl(models, drawn["policy"])[kept])}})
    for one in {one.name: one for one in (Standard(), served)}.values():
        name = "win rate" if one == Standard() else f"win rate as {one.name}"
        evaluation[name] = {"policy": intervals.of_shares(win_rates_of(ours, theirs, [one])[0])}
    return Evaluation(evaluation | _served(rewards, served, intervals))


def stream_seed(seed: int, name: str) -> int:
    """Return the seed of a model's samples: common random numbers would make those of two models dependent."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little")


def _kl(models: Mapping[str, Policy], drawn: Rollouts) -> Array:
    """Return the KL of the policy to the reference on each prompt, (P,)."""
    each, ids = min(KL_SAMPLES, drawn.k), column_values(drawn.drawn, "token_ids")
    responses = [ids[place] for place in range(len(ids)) if place % drawn.k < each]
    asked, (policy, reference) = repeated(drawn.prompts.token_ids, each), (model.model for model in models.values())
    with progress_line("KL") as report:
        kl = rao_blackwell_kl(policy, reference, asked, responses, on_progress=report)
    return np.asarray(kl.reshape(-1, each).mean(axis=1))


def _served(rewards: Mapping[str, Array], procedure: Procedure, intervals: Confidence) -> dict[str, Any]:
    """Return what one sample and the procedure serve, by metric."""
    checked = all(np.isin(values, (0.0, 1.0)).all() for values in rewards.values())
    metrics = ["pass@1" if checked else "avg@1"]
    if isinstance(procedure, Extreme) and procedure.n > 1:
        best, n = isinstance(procedure, BestOfN), procedure.n
        metrics.append(f"pass{'@' if best else '^'}{n}" if checked else f"{'best' if best else 'worst'}-of-{n}")
    measured = measure_all(RewardTable.of(rewards), metrics, Measuring(confidence=intervals), "reference")
    rows = [(one["model"], one) for one in measured["metrics"]]
    rows += [("difference", one) for one in measured["differences"]]
    return {metric: {who: one for who, one in rows if one["metric"] == metric} for metric in metrics}
