"""Commands that serve a policy of a run: answers to prompts, and a server."""

import json
import sys
from collections.abc import Iterable
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from infalign.cli.options import WHOLE, Host, Port, open_console, own_stdout
from infalign.core.display import plain_table, say
from infalign.core.errors import ConfigError, DataError
from infalign.core.signals import end_after_signal

if TYPE_CHECKING:
    from infalign.data.messages import Message
    from infalign.serving.answers import Answer, Asked

GENERATE_EPILOGUE = """\
Examples:
  infalign generate runs/demo --prompt "Make 10 from 9 3 7 1"
  infalign generate runs/demo --policy reference --procedure standard < prompts.txt
  infalign generate runs/demo --procedure best-of-8 --prompt "Hello" --all
  infalign generate runs/demo --procedure rewind:0.85:32 --input test.jsonl --json
  infalign generate runs/sums --procedure majority-of-16 --answer mine.py:number < prompts.txt

Prompts are lines of standard input or of a text file, or the column prompt (text
or messages) of a .jsonl, .jsonl.gz, .parquet or .csv file. --policy takes a
policy of the recipe, `reference`, or a folder with the same tokenizer. The run's
reward, or --reward, ranks the samples; it gets other columns of the file by
name. The same seed gives the same answers; a repeated prompt gets a new one.
"""
SERVE_EPILOGUE = """\
Example:
  infalign serve runs/demo --procedure best-of-4
  curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "aware", "messages": [{"role": "user", "content": "Hello"}]}'

Use any OpenAI client with base_url http://localhost:8080/v1. The model is the
policy's name; append another procedure after a colon: aware:worst-of-8,
aware:standard, aware:rewind:0.85:32. Completion tokens count all samples.
/v1/models, /health and /metrics are served too.
temperature must be 1, where the policy was trained and measured, or 0; top_p 1.
A --host other than this machine needs a token in INFALIGN_SERVE_TOKEN, which
clients send as their API key.
With --engine-url, another server such as vLLM samples (INFALIGN_ENGINE_KEY holds
its key); this one scores and chooses.
"""

RunPath = Annotated[Path, Parameter(help="A run directory.")]
PolicyName = Annotated[str | None, Parameter(help="A policy of the run; default: the recipe's first.")]
ProcedureName = Annotated[str | None, Parameter(help="standard, best-of-4, ...; default: the recipe's.")]
RewardSpec = Annotated[
    str | None, Parameter(help="my_file.py:check, module:check or a reward server's URL, instead of the run's reward.")
]
AnswerSpec = Annotated[
    str | None, Parameter(help="my_file.py:find or module:find; extracts the answer that a majority votes on.")
]
EngineUrl = Annotated[str | None, Parameter(help="URL of an OpenAI-compatible server that samples from the policy.")]
EngineModel = Annotated[str | None, Parameter(help="The policy's name on that server; default: its path.")]


def generate(
    run: RunPath,
    /,
    *,
    policy: PolicyName = None,
    procedure: ProcedureName = None,
    prompt: Annotated[list[str] | None, Parameter(help="A prompt. Repeatable.")] = None,
    input_: Annotated[
        Path | None, Parameter(name="--input", help="A file of prompts, instead of standard input.")
    ] = None,
    all_: Annotated[bool, Parameter(name="--all", help="Show every response with its rank and reward.")] = False,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of the sampling.")] = 0,
    reward: RewardSpec = None,
    answer: AnswerSpec = None,
    engine_url: EngineUrl = None,
    engine_model: EngineModel = None,
    as_json: Annotated[bool, Parameter(name="--json", help="Print one line of JSON per prompt.")] = False,
) -> None:
    """Answer prompts the way the policy is served."""
    import asyncio

    from infalign.pipeline.workers import prepare_process
    from infalign.serving.answers import answer_each
    from infalign.serving.policy import finding_answers, open_policy

    prepare_process(None)
    end_after_signal()  # which a reward or the search for an answer may keep from being seen
    questions = _questions(prompt, input_)
    with own_stdout() as out:
        served = open_policy(run, policy, procedure, engine_url=engine_url, engine_model=engine_model, reward=reward)
        served = finding_answers(served, answer)
        several, console = len(questions) > 1, open_console(out)

        def show(asked: "Asked", found: "Answer") -> None:
            if as_json:
                about = {"policy": served.name, "procedure": asked.procedure.name, "seed": seed}
                print(json.dumps(_record(asked, found, all_) | about), file=out, flush=True)
            else:
                _print(asked, found, console, every=all_, several=several)

        asyncio.run(answer_each(served, questions, show, seed=seed, score_all=all_))


def serve(
    run: RunPath,
    /,
    *,
    policy: PolicyName = None,
    procedure: ProcedureName = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    reward: RewardSpec = None,
    answer: AnswerSpec = None,
    most: Annotated[int, Parameter(help="Answers at once; more requests get 503.", validator=Number(gte=1))] = 256,
    engine_url: EngineUrl = None,
    engine_model: EngineModel = None,
) -> None:
    """Serve a policy with a procedure, through an OpenAI-compatible API."""
    from infalign.pipeline.workers import prepare_process
    from infalign.serving.app import app
    from infalign.serving.policy import finding_answers, open_policy
    from infalign.serving.web import bound, for_this_machine, listen, token_for

    prepare_process(None)
    token = token_for(host)
    with bound(host, port) as at:
        served = open_policy(run, policy, procedure, engine_url=engine_url, engine_model=engine_model, reward=reward)
        served = finding_answers(served, answer)
        say(open_console(), f"{served.name}, served as {served.procedure.name}: http://{host}:{port}/v1")
        listen(for_this_machine(app(served, token=token, most=most), token), at)


def _questions(prompts: list[str] | None, path: Path | None) -> "list[tuple[list[Message], str]]":
    """Return the prompts of the command line, of a file, or of standard input, with the other columns as JSON."""
    from infalign.data.examples import parse_prompt
    from infalign.data.files import READERS, read_rows
    from infalign.data.lines import lines

    if prompts is not None and path is not None:
        raise ConfigError("give --prompt or --input, not both")
    if prompts is not None:
        rows: Iterable[tuple[str, dict[str, Any]]] = [("--prompt", {"prompt": text}) for text in prompts]
    elif path is not None and path.name.endswith(tuple(READERS)):
        rows = read_rows(path)
    elif path is not None and path.suffix not in ("", ".txt"):
        raise DataError(f"{path} must end in .txt, with a prompt on each line, or in one of {', '.join(READERS)}")
    else:
        if path is None and sys.stdin.isatty():
            print("Prompts, one per line; end with Ctrl-D:", file=sys.stderr)
        try:
            with BytesIO(sys.stdin.buffer.read()) if path is None else path.open("rb") as file:
                written = lines(file, path or Path("standard input"))
                rows = [(where, {"prompt": line.strip()}) for where, line in written if line.strip()]
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
    asked = [parse_prompt(row, where) for where, row in rows]
    if not asked:
        raise DataError(f"{path or 'standard input'} has no prompts; write one per line")
    return [([*one.prompt], json.dumps(one.columns, default=str)) for one in asked]


def _record(asked: "Asked", answer: "Answer", every: bool) -> dict[str, Any]:
    """Return what a line of JSON says of an answer; rewards and ranks are None where none were needed."""
    ranked = zip_longest(answer.draws, answer.rewards, answer.ranks)
    draws = [{"text": draw.text, "reward": reward, "rank": rank} for draw, reward, rank in ranked]
    served = draws[answer.served]
    return {
        "prompt_id": asked.prompt.prompt_id,
        "prompt": asked.conversation,
        "answer": answer.text,
        "finish": answer.draws[answer.served].finish,
        "reward": served["reward"],
        "rank": served["rank"],
        "served": answer.served,
        "draws": len(draws),
        "base_draws": len(answer.base_draws),
        "tokens": answer.tokens,
        **({"all": draws} if every else {}),
    }


def _print(asked: "Asked", answer: "Answer", console: Console, *, every: bool, several: bool) -> None:
    """Print an answer, below its prompt if there are several; or every draw, the best first."""
    if several or every:
        first, *more = asked.conversation[-1]["content"].splitlines() or [""]  # a tool may say nothing
        say(console, f"\n{first}{' …' if more else ''}")
    if not every:
        say(console, answer.text)
        return
    table = plain_table("rank", "reward", "draw", "text", breaking=[3])
    for rank, place in sorted(zip(answer.ranks, range(len(answer.draws)), strict=True)):
        number = f"{place + 1}{' *' if place == answer.served else ''}"
        table.add_row(str(rank), f"{answer.rewards[place]:.3f}", number, answer.draws[place].text)
    console.print(table)
    base = f", {len(answer.base_draws)} from the base policy" if answer.base_draws else ""
    say(console, f"* served by {asked.procedure.name}; samples: {len(answer.draws)} from the policy{base}")
