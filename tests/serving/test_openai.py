"""`infalign serve`: a real server that OpenAI's own client asks."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import micro
import openai
import pytest
import torch
from clients import PROMPT, asked, client_of, concurrently, metrics, policy, serving
from faults.server import RolloutServer
from openai import OpenAI

from infalign.method.procedures import parse_procedure
from infalign.models.pretrained import load_policy
from infalign.sampling.engine import Sampling
from infalign.serving.answers import Answer
from infalign.serving.app import Desk
from infalign.serving.policy import open_policy

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def library(run: Path, text: str, procedure: str, *, seed: int, choice: int = 0) -> Answer:
    """Return the answer that the library gives without a server."""

    async def answer() -> Answer:
        served = policy(run)
        async with served.working():
            turn, how = {"role": "user", "content": text}, parse_procedure(procedure)
            (one,) = served.asked([turn], how, Sampling(12, seed), choices=[choice])
            return await served.answer(one)

    return asyncio.run(answer())


def test_64_clients_at_once_get_what_each_would_get_alone(trained_run: Path, url: str) -> None:
    """Their draws are made and scored together, and counted."""
    before = metrics(url)
    answers = concurrently(url, [asked(f"Explain the number {i}.", seed=i, model="aware:best-of-4") for i in range(64)])
    for i in (0, 1, 33, 63):
        alone = library(trained_run, f"Explain the number {i}.", "best-of-4", seed=i)
        (choice,) = answers[i].choices
        assert choice.message.content == alone.text
        rewards = pytest.approx(alone.rewards)
        assert choice.infalign == {"draws": 4, "served": alone.served, "rewards": rewards, "base_draws": 0}
        assert answers[i].usage.completion_tokens == alone.tokens
        assert answers[i].usage.draws == 4
        assert answers[i].model == "aware:best-of-4"
    spent = {name.removeprefix("infalign_"): value - before[name] for name, value in metrics(url).items()}
    assert [spent[name] for name in ("answers_total", "draws_total", "scores_total")] == [64, 256, 256]
    assert spent["score_batches_total"] < 64
    assert spent["draw_tokens_total"] == sum(answer.usage.completion_tokens for answer in answers)


def test_a_stream_has_the_whole_answer(client: OpenAI) -> None:
    """Clients that stream get it as one event, with the usage at the end if asked for."""
    request = asked(model="aware:standard", seed=5)
    whole = client.chat.completions.create(**request)
    piece, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    delta, choice = piece.choices[0].delta, whole.choices[0]
    assert (delta.role, delta.content) == ("assistant", choice.message.content)
    assert (piece.choices[0].finish_reason, piece.choices[0].infalign) == (choice.finish_reason, choice.infalign)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert choice.infalign["rewards"] == []


def test_every_choice_is_an_answer_of_its_own(trained_run: Path, client: OpenAI) -> None:
    """n choices have n times the draws, and a seed gives the same ones, streamed or not."""
    request = asked(model="aware:worst-of-3", seed=9, n=3)
    found = client.chat.completions.create(**request)
    expected = [library(trained_run, PROMPT, "worst-of-3", seed=9, choice=choice) for choice in range(3)]
    assert [choice.message.content for choice in found.choices] == [answer.text for answer in expected]
    assert len({choice.message.content for choice in found.choices}) == 3
    assert found.usage.completion_tokens == sum(answer.tokens for answer in expected)
    streamed = [piece.choices[0] for piece in client.chat.completions.create(**request, stream=True)]
    for choice, piece in zip(found.choices, streamed, strict=True):
        assert choice.infalign["rewards"][choice.infalign["served"]] == min(choice.infalign["rewards"])
        assert (piece.delta.content, piece.infalign) == (choice.message.content, choice.infalign)


def test_a_seed_that_the_server_chose_can_be_asked_for_again(client: OpenAI) -> None:
    """Without a seed answers differ, and each says the seed that gives it again."""
    first, second = (client.chat.completions.create(**asked()) for _ in range(2))
    assert first.choices[0].message.content != second.choices[0].message.content
    again = client.chat.completions.create(**asked(seed=first.infalign["seed"]))
    assert again.choices[0].message.content == first.choices[0].message.content


def test_rewinding_stops_at_the_first_draw_that_passes(client: OpenAI) -> None:
    """Its threshold is drawn from the base policy once a prompt, and the answer says how many draws it took."""
    taken = []
    for seed in range(12):
        answer = client.chat.completions.create(**asked("How is tea made?", "aware:rewind:0.75:6", seed=seed))
        about = answer.choices[0].infalign
        assert about["base_draws"] == (32 if seed == 0 else 0)
        assert len(about["rewards"]) == about["draws"]
        assert about["served"] == about["draws"] - 1
        taken.append(about["rewards"])
    failed = [reward for rewards in taken for reward in rewards[:-1]]
    assert max(failed) < min(rewards[-1] for rewards in taken if len(rewards) < 6)


def test_what_is_longer_is_cut_and_what_may_be_longer_is_not(client: OpenAI) -> None:
    """max_tokens cuts every draw; beyond the length of training there is nothing."""
    whole, cut, more = (
        client.chat.completions.create(**asked(seed=2, model="aware:standard", **{name: limit}))
        for name, limit in (("max_tokens", 12), ("max_completion_tokens", 3), ("max_tokens", 4000))
    )
    assert whole.choices == more.choices
    assert cut.usage.completion_tokens == 3
    assert cut.choices[0].finish_reason == "length"
    beginning = cut.choices[0].message.content.rstrip("\N{REPLACEMENT CHARACTER}")
    assert whole.choices[0].message.content.startswith(beginning)


def test_what_asks_for_nothing_is_no_reason_to_refuse(client: OpenAI) -> None:
    """Clients send defaults; parts of text are joined."""
    plain = client.chat.completions.create(**asked(seed=1))
    defaults = {"temperature": 1.0, "top_p": 1, "frequency_penalty": 0, "stop": None, "user": "me", "logprobs": False}
    defaults |= {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": True}
    parts = [{"type": "text", "text": part} for part in (PROMPT[:4], PROMPT[4:])]
    found = client.chat.completions.create(**asked(parts, seed=1, **defaults))
    assert found.choices == plain.choices


def test_a_developer_is_a_system(client: OpenAI) -> None:
    """The role that OpenAI gave a new name."""
    turns = [{"role": role, "content": "Be short."} for role in ("developer", "system")]
    user = {"role": "user", "content": PROMPT}
    new, old = (client.chat.completions.create(**asked(seed=1) | {"messages": [turn, user]}) for turn in turns)
    assert new.choices == old.choices


def test_temperature_0_has_the_likeliest_token_at_each_place(client: OpenAI, trained_run: Path) -> None:
    """By transformers' greedy decoding; with any procedure all draws are alike."""
    model, tokenizer = load_policy(trained_run / "models" / "aware")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        for _ in range(12):
            if ids[-1] == tokenizer.eos_token_id:
                break
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    found = client.chat.completions.create(**asked(temperature=0, model="aware:best-of-2"))
    assert found.choices[0].message.content
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith(found.choices[0].message.content)


@pytest.mark.parametrize("model", ["aware:standard", "aware:best-of-4"])
def test_a_stop_ends_the_text_before_it(client: OpenAI, model: str) -> None:
    """Also in a stream; the reward is that of what is left."""
    whole = client.chat.completions.create(**asked(seed=5, model=model)).choices[0].message.content
    stop = ["not to be found", whole[3:6]]
    request = asked(seed=5, model="aware:standard", stop=stop)
    plain = client.chat.completions.create(**asked(seed=5, model="aware:standard")).choices[0].message.content
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.message.content == plain.partition(whole[3:6])[0]
    assert choice.finish_reason == "stop" or whole[3:6] not in plain
    pieces = client.chat.completions.create(**request, stream=True)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == choice.message.content
    (best,) = client.chat.completions.create(**asked(seed=5, model=model, stop=stop)).choices
    assert whole[3:6] not in best.message.content
    if best.infalign["rewards"]:
        reward = micro.brightness([], [best.message.content])[0]
        assert best.infalign["rewards"][best.infalign["served"]] == pytest.approx(reward)


def test_the_server_says_what_it_has(client: OpenAI, url: str) -> None:
    """Models with procedures that can be asked for; health."""
    assert [model.id for model in client.models.list()] == ["aware", "aware:best-of-4", "aware:standard"]
    for name in ("aware", "aware:worst-of-2"):
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="this server has aware"):
        client.models.retrieve("gpt-4")
    assert client.chat.completions.create(**asked()).model == "aware:best-of-4"
    health = httpx2.get(url.replace("/v1", "/health")).json()
    assert health == {"status": "ok", "policy": "aware", "procedure": "best-of-4"}


def test_a_folder_may_have_a_colon_in_its_name(trained_run: Path) -> None:
    """What follows the whole name is the procedure."""
    desk = Desk(policy(trained_run, name="mine:2"), most=1)
    assert desk.procedure("mine:2").name == "best-of-4"
    assert desk.procedure("mine:2:rewind:0.75:6").name == "rewind:0.75:6"


def test_the_page_shows_what_works(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example of docs/serving.md runs against a server."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8080/v1", url), names)
    names["client"].close()
    assert "'draws': 4" in capsys.readouterr().out


def test_an_engine_at_a_url_draws_and_this_server_chooses(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives four draws in one request, the best by reward is served, and seeds are refused."""
    monkeypatch.setattr("infalign.serving.policy.SERVING_RETRY_SECONDS", 0.5)
    with (
        RolloutServer(*load_policy(trained_run / "models" / "aware")) as engine,
        serving(open_policy(trained_run, engine_url=engine.url, engine_model="policy")) as url,
        client_of(url) as client,
    ):
        answer = client.chat.completions.create(**asked())
        about = answer.choices[0].infalign
        assert (about["draws"], len(about["rewards"])) == (4, 4)
        assert about["rewards"][about["served"]] == max(about["rewards"])
        assert about["rewards"][about["served"]] == micro.brightness([], [answer.choices[0].message.content])[0]
        assert engine.bodies[-1]["n"] == 4
        assert engine.bodies[-1]["model"] == "policy"
        assert answer.model_extra == {}  # it may not give the same again
        cut = list(client.chat.completions.create(**asked(model="aware:standard", max_tokens=2, stream=True)))
        assert cut[-1].choices[0].finish_reason in ("length", "stop")
        assert engine.bodies[-1]["max_tokens"] == 2
        with pytest.raises(openai.BadRequestError, match="leave seed out"):
            client.chat.completions.create(**asked(seed=1))
        engine.script = [400]
        with pytest.raises(openai.BadRequestError, match="refused the request: status 400"):
            client.chat.completions.create(**asked())
        engine.broken_after = 0
        with pytest.raises(openai.InternalServerError, match="did not answer"):
            client.chat.completions.create(**asked())
