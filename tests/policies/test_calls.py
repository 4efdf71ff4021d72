"""The calls of the library: responses, their rewards, and what a policy gains, from Python alone."""

from functools import partial
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from faults.server import RolloutServer
from rows import user
from tiny_models import tiny
from transformers import AutoModelForSequenceClassification

from infalign import ClassifierReward, Rollouts, calibrate_prompts, evaluate, sample, score
from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import hash_file
from infalign.models.conversations import decode
from infalign.models.policy import Policy, identity
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Compute, Scratch
from infalign.sampling.prompts import Prompts, Sampler
from infalign.sampling.rollouts import read_rollouts
from infalign.sampling.sample import prompt_rows
from infalign.sampling.settings import KINDS

PROMPTS = [
    "How do I write a function?",
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Please explain the moon."}],
    {"prompt": "What is the moon?", "answer": "m"},
]


def test_responses_are_those_of_a_run_by_any_engine(model: str, tmp_path: Path) -> None:
    """A folder, a loaded model, transformers' engine and the sampler of a run draw the same; a server from the same."""
    drawn = sample(model, PROMPTS, 5, max_new_tokens=6, seed=3)
    loaded = sample(Policy.of(model).model, PROMPTS, 5, engine={"kind": "transformers"}, max_new_tokens=6, seed=3)
    assert drawn.texts == loaded.texts
    prompts = Prompts.of(drawn.asked)
    run = Sampler(model, KINDS["shared-prefix"](kind="shared-prefix"), 6, Compute(device="cpu"))
    run.draw(prompts, 5, tmp_path, seed=3, on_progress=lambda *_: None)
    assert read_rollouts(tmp_path, prompts.prompt_ids, 5).equals(drawn.drawn)
    assert (np.shape(drawn.texts), prompts.columns[2]) == ((3, 5), '{"answer": "m"}')
    with RolloutServer(*Policy.of(model)) as server:
        served = sample(model, PROMPTS, 4, engine=server.url, max_new_tokens=6)
    assert {len(row) for row in served.texts} == {4}
    assert np.isfinite(served.drawn["logprob"].to_numpy()).all()


def test_a_slower_engine_is_announced(model: str) -> None:
    """A model whose layers attend to a window draws with transformers, with a warning that says why."""
    tokenizer = Policy.of(model).tokenizer
    shape = {"sliding_window": 4, "max_position_embeddings": 192, "eos_token_id": tokenizer.eos_token_id}
    windowed = tiny("Mistral", len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape)
    with pytest.warns(UserWarning, match=r"responses are drawn with transformers' generate, which is slower"):
        sample((windowed, tokenizer), PROMPTS, 2, max_new_tokens=2)


def test_a_folder_continues_and_grows(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stopped call has drawn is kept; a larger k and further prompts are added; loaded, it is the same."""
    whole, folder = sample(model, PROMPTS, 6, max_new_tokens=4), tmp_path / "rollouts"
    assert sample(model, PROMPTS[:2], 3, folder=folder, max_new_tokens=4).k == 3
    shard = (folder / "part-00000.parquet").read_bytes()
    grown = sample(model, PROMPTS, 6, folder=folder, max_new_tokens=4)
    assert (folder / "part-00000.parquet").read_bytes() == shard
    assert grown.texts == whole.texts == Rollouts.load(folder).texts
    assert "3 prompts × 6 responses" in repr(grown)
    place = grown.asked.column_names.index("token_ids")
    pq.write_table(grown.asked.set_column(place, "token_ids", pa.array([[1]] * 3)), folder / "prompts.parquet")
    with pytest.raises(ConfigError, match="rollouts with another chat template or other tools"):
        sample(model, PROMPTS, 6, folder=folder, max_new_tokens=4)
    pq.write_table(grown.asked.replace_schema_metadata(None), folder / "prompts.parquet")
    with pytest.raises(DataError, match="does not say how its rollouts were drawn"):
        Rollouts.load(folder)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {}, "there are no prompts; give at least one"),
        (["Hi!"], {"k": 0}, "k must be at least 1, found 0"),
        (["Hi!"], {"max_new_tokens": 0}, "sample: `max_new_tokens`: .* greater than or equal to 1, found 0"),
        (["Hi!"], {"max_tokens": 9}, "sample: unknown key `max_tokens`; did you mean `max_new_tokens`?"),
        (["Hi!", "Hi!"], {}, "occurs 2 times; keep one"),
        ([""], {}, "prompt 0: the last turn of the prompt is empty"),
        ([{"text": "Hi!"}], {}, "prompt 0: the columns"),
        (["Hi!"], {"engine": "server"}, "sample: `engine.url`: a URL must start with http"),
        (["Hi!"], {"max_new_tokens": 500}, "exceeds the model's context of 192"),
    ],
)
def test_bad_prompts_and_options_are_refused(model: str, prompts: Any, options: Any, said: str) -> None:
    """In one sentence that says what was found."""
    with pytest.raises((ConfigError, DataError), match=said):
        sample(model, prompts, **options)


def test_bad_models_and_folders_are_refused(model: str, tmp_path: Path) -> None:
    """A model without a chat template, rollouts of another seed or model, and a folder that is somebody else's."""
    bare = Policy.of(model)
    bare.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; .* give \(model, tokenizer\)"):
        sample(tuple(bare), PROMPTS)
    with pytest.raises(ConfigError, match="instead of a loaded model give the folder or hub id"):
        sample(Policy.of(model), PROMPTS, engine="http://127.0.0.1:9")
    drawn = sample(model, PROMPTS, 2, folder=tmp_path / "mine", max_new_tokens=2)
    with pytest.raises(ConfigError, match="has rollouts with another seed, 0 instead of 1; choose a new folder"):
        sample(model, PROMPTS, 2, folder=tmp_path / "mine", max_new_tokens=2, seed=1)
    other = Policy.of(model)
    torch.nn.init.normal_(other.model.lm_head.weight)
    for content in (b"GGUF before", b"GGUF after"):
        (tmp_path / "replaced.gguf").write_bytes(content)
        assert identity(tmp_path / "replaced.gguf") == hash_file(tmp_path / "replaced.gguf")
    with pytest.raises(ConfigError, match="has rollouts with another model"):
        sample(other, PROMPTS, 2, folder=tmp_path / "mine", max_new_tokens=2)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    for call in (lambda folder: sample(model, PROMPTS, 2, folder=folder), drawn.save):
        with pytest.raises(ConfigError, match="theirs is not an empty folder; choose a new one"):
            call(tmp_path / "theirs")


def test_equal_responses_have_equal_rewards_and_columns_arrive(model: str) -> None:
    """Even by a function that draws lots; one that returns None leaves its prompt out, as a row of NaN."""
    rng = np.random.default_rng(0)
    rollouts = sample(model, PROMPTS, 30, max_new_tokens=1)

    def lots(responses: list[str], answer: Any = ()) -> list[float | None]:
        return [None if one is None else rng.random() for one in answer]

    rewards = score(lots, rollouts)
    assert np.isnan(rewards[:2]).all()
    texts = np.array(rollouts.texts[2])
    assert 1 < len(set(texts)) < 30
    assert all(len({*rewards[2][texts == text]}) == 1 for text in texts)
    assert len({*rewards[2]}) == len({*texts})


def test_a_reward_is_also_a_spelling_or_a_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recipe spells it, or the folder of a reward model; the values are those of the function itself."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def letters(responses):\n    return [len(text) for text in responses]\n")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained("reward")
    Policy.of(model).tokenizer.save_pretrained("reward")
    rollouts = sample(model, PROMPTS, 4, max_new_tokens=5)
    assert score("mine.py:letters", rollouts).tolist() == [[len(text) for text in row] for row in rollouts.texts]
    judged = ClassifierReward.load("reward")([rollouts.prompts.conversations[1]] * 4, rollouts.texts[1])
    np.testing.assert_allclose(score("reward", rollouts)[1], judged, rtol=1e-4, atol=1e-6)
    asked = calibrate_prompts(model, PROMPTS[::2], "mine.py:letters", k=4, max_new_tokens=5)  # texts and rows
    drawn = sample(model, PROMPTS[::2], 4, max_new_tokens=5)
    assert asked["answer"] == [None, "m"]
    assert [*asked["prompt"]] == [*drawn.prompts.conversations]  # as a trainer must ask too
    again = calibrate_prompts(model, Dataset.from_list([{"question": "m?"}]), "mine.py:letters", k=4, max_new_tokens=5)
    assert again[0]["prompt"] == [{"role": "user", "content": "m?"}]
    np.testing.assert_array_equal(asked["reference_rewards"], np.sort(score("mine.py:letters", drawn)))

    def broken(responses: list[str]) -> list[float]:
        return [float("nan")] * len(responses)

    with pytest.raises(DataError, match=r"reward broken, row 0 .*nan"):
        score(broken, rollouts)


def test_a_checker_gets_the_values_that_rows_have(model: str) -> None:
    """Also those of NumPy and of a table, which JSON lacks."""
    kept = {"number": np.int64(4), "right": np.False_, "several": np.array(["4", "four"]), "some": {4}}
    seen: list[Any] = []

    def check(responses: list[str], number: Any, right: Any, several: Any, some: Any) -> list[float]:
        seen.append((number[0], right[0], several[0], some[0]))
        return [0.0] * len(responses)

    score(check, sample(model, [{"prompt": "Hi", **kept}], 2, max_new_tokens=2))
    assert seen == [(4, False, ["4", "four"], [4])]
    rows = [{"prompt": [user("a")], "of": {"x": 1}}, {"prompt": [user("b") | {"name": "B"}], "of": {"y": None}}]
    assert prompt_rows(Dataset.from_list(rows)) == [rows[0], rows[1] | {"of": {}}]  # which it makes of one form


@pytest.mark.parametrize("odd", ["Hi", {"train": ["Hi"]}, pd.DataFrame({"prompt": ["Hi"]})])
def test_what_is_no_list_of_prompts_is_refused(model: str, odd: Any) -> None:
    """Its letters or its names would be asked."""
    for ask in (calibrate_prompts, partial(evaluate, reference=model)):
        with pytest.raises(DataError, match="prompts are a list"):
            ask(model, odd, lambda responses: [0.0] * len(responses))
    with pytest.raises(DataError, match="values of several types"):
        calibrate_prompts(model, [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "1"}], lambda responses: [0])


def test_kl_and_win_rates_are_those_of_the_enumerated_responses(model: str) -> None:
    """Of two models that say one token, all tokens are listed: the KL is exact, win rates and pass@k are unbiased."""
    reference, policy = Policy.of(model), Policy.of(model)
    torch.manual_seed(0)
    with torch.no_grad():
        policy.model.lm_head.weight.add_(0.5 * torch.randn_like(policy.model.lm_head.weight))

    def check(responses: list[str]) -> list[float]:
        return [float(text[:1] in tuple("aeioumnp")) for text in responses]

    def first_token(network: Any, ids: list[int]) -> np.ndarray:
        return network(torch.tensor([ids])).logits[0, -1].detach().double().softmax(-1).numpy()

    found = evaluate(policy, PROMPTS, check, "best-of-2", reference=reference, samples=400, max_new_tokens=1)
    asked = sample(reference, PROMPTS, 1, max_new_tokens=1).prompts.token_ids
    p, q = ([first_token(one.model, ids) for ids in asked] for one in (policy, reference))
    exact_kl = np.mean([(a * np.log(a / b)).sum() for a, b in zip(p, q, strict=True)])
    assert found["KL, nats"]["policy"]["mean"] == pytest.approx(exact_kl, rel=1e-5)
    right = np.array(check(decode(reference.tokenizer, [[i] for i in range(p[0].size)])), bool)
    ours, theirs = (np.array([law[right].sum() for law in laws]) for laws in (p, q))
    wins = 0.5 + 0.5 * ((1 - (1 - ours) ** 2) - (1 - (1 - theirs) ** 2)).mean()
    assert found["win rate as best-of-2"]["policy"]["mean"] == pytest.approx(wins, abs=0.03)
    assert found["pass@2"]["policy"]["mean"] == pytest.approx((1 - (1 - ours) ** 2).mean(), abs=0.05)
    assert max(map(len, str(found).splitlines())) <= 100


def test_what_cannot_be_compared_is_refused(model: str, tmp_path: Path) -> None:
    """Another tokenizer, fewer samples than the procedure draws, and a reward that leaves out by the response."""
    words = train_tokenizer(["Quite another text, with other words!"] * 9, Scratch(**micro.SCRATCH))
    other = (new_policy(Scratch(**micro.SCRATCH), words, seed=0), words)
    with pytest.raises(ConfigError, match="differs from the reference's"):
        evaluate(other, PROMPTS, len, reference=model)
    with pytest.raises(DataError, match="best-of-8"):
        evaluate(model, PROMPTS, lambda responses: [1.0] * len(responses), "best-of-8", reference=model, samples=4)
    with pytest.raises(DataError, match="returned None for every prompt"):
        evaluate(model, PROMPTS, lambda responses: [None] * len(responses), reference=model, samples=2)
