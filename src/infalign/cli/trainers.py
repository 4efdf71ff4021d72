"""Commands for other trainers: one that serves a reward, one that writes their data."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from infalign.cli.options import Host, Port, open_console
from infalign.core.display import say

SERVE_EPILOGUE = """\
Example:
  infalign serve-reward runs/demo --transform exp:10
  curl localhost:5000/health

Trainers POST to /get_reward: OpenRLHF {query, prompts, labels}, slime {prompt,
response, label}; a label is a JSON object with prompt, prompt_id,
reference_rewards and columns of calibrated.parquet. The answer has the shaped
reward, the win rate and the reward. A --host other than this machine needs a token in
INFALIGN_SERVE_TOKEN, which requests send as Authorization: Bearer.
"""
EXPORT_EPILOGUE = """\
Example:
  infalign export runs/demo --to verl --transform exp:10 --kl 1
writes runs/demo/export/verl/train.parquet and prints the training command with
the flags that preserve the transformation: RLOO, and KL in the reward at the
weight that spends the budget. Add batch sizes and the flags of your machine.
"""


def export(
    run: Annotated[Path, Parameter(help="A run directory with calibrated rewards.")],
    /,
    *,
    to: Annotated[Literal["trl", "verl", "openrlhf"], Parameter(help="The trainer to export for.")],
    transform: Annotated[str, Parameter(help="The transformation of ranks, such as exp:10, or optimal.")],
    kl: Annotated[float, Parameter(help="KL budget, in nats per response.")],
) -> None:
    """Write a run's calibrated prompts for another trainer, and print how to start it."""
    from infalign.integrations.export import export as exported

    path, transform, command = exported(run, to, transform=transform, kl=kl)
    environment = shlex.join(["export", f"INFALIGN_REWARD={run}", f"INFALIGN_TRANSFORM={transform}"])
    say(open_console(), f"# {path}\n{environment}\n{shlex.join(command)}")


def serve_reward(
    source: Annotated[str, Parameter(help="A run directory, package.module:function, a URL, or a classifier.")],
    /,
    *,
    transform: Annotated[str, Parameter(help="The transformation of ranks, such as exp:10.")],
    host: Host = "127.0.0.1",
    port: Port = 5000,
) -> None:
    """Serve the calibrated and transformed reward over HTTP, for trainers that call a reward server."""
    from infalign.integrations.environment import calibrated, find_tokenizer
    from infalign.integrations.server import app
    from infalign.serving.web import bound, for_this_machine, listen, token_for

    token = token_for(host)
    with bound(host, port) as at:
        served = app(calibrated(source, transform), find_tokenizer(source), token=token)
        listen(for_this_machine(served, token), at)
