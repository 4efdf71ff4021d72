"""`infalign generate`: the answers of a policy to prompts from anywhere, as it is served."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import micro
import pytest
import torch
from clients import policy
from peft import LoraConfig, get_peft_model
from rows import user, written

from infalign.models.guided import GuidedForCausalLM
from infalign.models.pretrained import load_policy
from infalign.serving.answers import answer_each

PROMPTS = ["How do I bake bread?", "Explain the moon.", "How do I bake bread?"]


def generated(run: Path, *words: object) -> list[dict[str, Any]]:
    """Return the records that the command prints."""
    return [json.loads(line) for line in micro.answer("generate", run, "--json", *words).splitlines()]


def ask(run: Path, *words: object) -> dict[str, Any]:
    """Return what the command answers to the first prompt with every draw."""
    (record,) = generated(run, "--prompt", PROMPTS[0], "--all", *words)
    return record


def test_the_draw_is_served_that_the_procedure_chooses(trained_run: Path) -> None:
    """Every draw comes with the run's reward and its rank; the same seed gives the same, another one others."""
    best = ask(trained_run)
    assert best["procedure"] == "best-of-4"
    assert best["draws"] == len(best["all"]) == 4
    rewards = micro.brightness([], [draw["text"] for draw in best["all"]])
    assert [draw["reward"] for draw in best["all"]] == pytest.approx(rewards)
    assert sorted(draw["rank"] for draw in best["all"]) == [1, 2, 3, 4]
    assert (best["rank"], best["answer"]) == (1, best["all"][best["served"]]["text"])
    worst = ask(trained_run, "--procedure", "worst-of-4")
    assert worst["all"] == best["all"]
    assert worst["rank"] == 4
    other = ask(trained_run, "--seed", 1)
    assert {draw["text"] for draw in other["all"]}.isdisjoint(draw["text"] for draw in best["all"])


def test_prompts_come_from_everywhere(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts give the same answers from a text, a table and standard input; one that comes again another."""
    text = tmp_path / "prompts.txt"
    text.write_text("\n\n".join(PROMPTS) + "\n")
    rows: list[dict[str, Any]] = [{"prompt": [user(prompt)]} for prompt in PROMPTS[:2]]
    table = written(tmp_path / "prompts.jsonl", [*rows, {"prompt": PROMPTS[2], "chosen": "unread"}])
    found = generated(trained_run, "--input", text)
    assert found == generated(trained_run, "--input", table)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    assert found == generated(trained_run)
    assert [answer["prompt"][0]["content"] for answer in found] == PROMPTS
    assert found[0]["answer"] != found[2]["answer"]
    served, sizes = policy(trained_run), list[int]()
    served.tokenizer.chat_template = f"{{{{ tools }}}}{served.tokenizer.chat_template}"
    asked_with = [([user("Hi")], columns) for columns in ("{}", '{"tools": [{"type": "function"}]}')]
    asyncio.run(answer_each(served, asked_with, lambda asked, _: sizes.append(len(asked.prompt.token_ids)), seed=0))
    assert sizes[0] < sizes[1]  # the template shows the tools of a row


def test_a_checker_or_a_vote_chooses_the_answer(trained_run: Path, tmp_path: Path) -> None:
    """A function in place of the run's reward gets the columns of the file; a vote is on what a function finds."""
    mine, table = tmp_path / "mine.py", [{"prompt": prompt, "answer": 2} for prompt in PROMPTS]
    check = "def check(responses, answer):\n    return [float(len(r) % a == 1) for r, a in zip(responses, answer)]\n"
    mine.write_text(f"{check}def size(text):\n    return len(text) % 3\n")
    words = ("--input", written(tmp_path / "sums.jsonl", table), "--reward", f"{mine}:check", "--all", "--procedure")
    for answer in generated(trained_run, *words, "best-of-8"):
        assert [draw["reward"] for draw in answer["all"]] == [len(draw["text"]) % 2 for draw in answer["all"]]
        assert answer["reward"] == max(draw["reward"] for draw in answer["all"])
    for answer in generated(trained_run, *words, "majority-of-8", "--answer", f"{mine}:size"):
        sizes = [len(draw["text"]) % 3 for draw in answer["all"]]
        assert (answer["draws"], answer["procedure"]) == (8, "majority-of-8")
        assert sizes.count(sizes[answer["served"]]) == max(map(sizes.count, sizes))
    said = f"answer function '{mine}:none': {mine} has no function none"
    assert said in micro.refusal("generate", trained_run, *words, "majority-of-8", "--answer", f"{mine}:none")
    err = micro.refusal("generate", trained_run, "--prompt", PROMPTS[0], "--reward", f"{mine}:check", code=3)
    assert "needs the column answer, which is missing in every row" in err
    assert "columns come from metadata or --input; majority-of-8 needs no reward" in err


def test_a_reader_sees_answers_or_all_draws_in_their_order(trained_run: Path) -> None:
    """One prompt gives its answer alone; terminal escapes that a model writes are not obeyed."""
    out = micro.answer("generate", trained_run, "--prompt", PROMPTS[0])
    assert len(out.splitlines()) == 1 + ask(trained_run)["answer"].count("\n")
    out = micro.answer("generate", trained_run, "--prompt", PROMPTS[0], "--all")
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()] == ["1", "2", "3", "4"]
    assert "served by best-of-4; samples: 4 from the policy" in out
    assert all(letter.isprintable() or letter == "\n" for letter in out)


def test_policies_from_elsewhere_are_served(trained_run: Path, tmp_path: Path) -> None:
    """A LoRA adapter on the reference, and a guided policy; each answers as the reference until it has learned."""
    reference, tokenizer = load_policy(trained_run.parent / "policy")
    plain = ask(trained_run, "--policy", "reference")
    model = get_peft_model(reference, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "fresh")
    assert ask(trained_run, "--policy", tmp_path / "fresh")["all"] == plain["all"]
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "learned")
    assert ask(trained_run, "--policy", tmp_path / "learned")["all"] != plain["all"]
    shape = {"hidden": 8, "layers": 1, "reads": 1}
    guided = GuidedForCausalLM.with_side_network(load_policy(trained_run.parent / "policy")[0], **shape)
    guided.save_pretrained(tmp_path / "guided")
    tokenizer.save_pretrained(tmp_path / "guided")
    assert ask(trained_run, "--policy", tmp_path / "guided")["all"] == plain["all"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--policy", "absent"], 2, "has no policy absent, and no such folder exists; it has reference, aware"),
        (["--procedure", "best"], 2, "unknown procedure 'best'"),
        (["--procedure", "rewind:0.99:2"], 2, "32 rollouts per prompt are too few for the quantile 0.99"),
        (["--input", "absent.txt"], 2, "give --prompt or --input, not both"),
        (["--prompt", " "], 3, "--prompt: the last turn of the prompt is empty"),
        (["--engine-url", "http://127.0.0.1:9/?api_key=x"], 2, "--engine-url: a URL must not contain api_key"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(trained_run: Path, words: list[str], code: int, said: str) -> None:
    """With the exit code of its kind, and nothing on standard output."""
    assert said in micro.refusal("generate", trained_run, "--prompt", "Hello", *words, code=code)


def test_files_without_prompts_are_refused(trained_run: Path, tmp_path: Path) -> None:
    """An absent one, an empty one, a table without the column; and a folder that is no run's."""
    (tmp_path / "empty.txt").write_text("\n")
    written(tmp_path / "odd.jsonl", [{"text": "Hello"}])
    (tmp_path / "rows.ndjson").write_text('{"prompt": "Hello"}\n')
    for name, said in (
        ("absent.txt", ": No such file"),
        ("empty.txt", " has no prompts; write one per line"),
        ("odd.jsonl", " line 1: column prompt is missing"),
        ("rows.ndjson", " must end in .txt, with a prompt on each line, or in one of .jsonl"),
    ):
        assert f"{name}{said}" in micro.refusal("generate", trained_run, "--input", tmp_path / name, code=3)
    assert "is not a run directory" in micro.refusal("generate", tmp_path, "--prompt", "Hello")
