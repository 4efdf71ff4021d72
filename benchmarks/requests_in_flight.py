"""Print the time of rollouts and rewards from a server that takes 0.25 s a request, over that of one request at a time.

    python benchmarks/requests_in_flight.py

A server on 127.0.0.1, in a process of its own, that computes nothing. A request is for 100 responses of 16 tokens, or
for 64 rewards. "over floor" is the time over latency × requests / requests in flight; what is sent, parsed and written
counts. "bare" is a client that throws the answers away: what this machine can do while other work runs on it. Exits
with 1 if rollouts or rewards take more than 1.1 times as long as that with 16 in flight.
"""

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_to
from infalign.rewards.server import RemoteReward
from infalign.sampling.engine import Prompt, Sampling, Vocabulary
from infalign.sampling.rollouts import draw
from infalign.sampling.server import ServerEngine

LATENCY, LIMIT = 0.25, 1.1
K, TOKENS, BATCH = 100, 16, 64
VOCABULARY, EOS = 64, 1


def completions(body: dict[str, Any]) -> dict[str, Any]:
    """Return responses that differ, without a model."""

    def choice(number: int) -> dict[str, Any]:
        token_ids = [2 + (body["seed"] + number * place) % (VOCABULARY - 2) for place in range(TOKENS - 1)]
        return {
            "finish_reason": "stop",
            "token_ids": [*token_ids, EOS],
            "logprobs": {"token_logprobs": [-1.0] * TOKENS},
        }

    return {"choices": [choice(number) for number in range(body["n"])]}


def rewards(body: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths of the queries."""
    return {"rewards": [float(len(query)) for query in body["query"]]}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection, each after the latency."""
    with suppress(asyncio.IncompleteReadError):  # the client has gone
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
            await asyncio.sleep(LATENCY)
            said = json.dumps(completions(body) if b"/v1/completions" in head else rewards(body)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)


def serve(ready: Connection) -> None:
    """Serve, and tell the port."""

    async def forever() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


def bare(port: int, requests: int, in_flight: int) -> None:
    """Send requests for responses to the server and read its answers, and do nothing with them."""
    body = json.dumps({"n": K, "seed": 0}).encode()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(number, requests, in_flight):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split()[-1]))
        writer.close()

    async def clients() -> None:
        await asyncio.gather(*map(client, range(in_flight)))

    asyncio.run(clients())


def words() -> Any:
    """Return a tokenizer of words, with a chat template."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and judge."""
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=[there], daemon=True).start()
    port, tokenizer = here.recv(), words()
    url = f"http://127.0.0.1:{port}"

    def rollouts(requests: int, in_flight: int) -> None:
        engine = ServerEngine(url, "none", Vocabulary(tokenizer), Sampling(TOKENS), in_flight=in_flight)
        asked = [Prompt(f"p{i}", [2 + i % 50, 2 + i // 50]) for i in range(requests)]
        with tempfile.TemporaryDirectory() as folder:
            draw(engine, asked, K, Path(folder), on_progress=lambda *_: None)

    def scores(requests: int, in_flight: int) -> None:
        reward = RemoteReward(f"{url}/get_reward", tokenizer, batch=BATCH, in_flight=in_flight)
        prompts = [[{"role": "user", "content": f"prompt {i}"}] for i in range(requests) for _ in range(BATCH)]
        responses = [f"response {i}" for i in range(requests * BATCH)]
        with tempfile.TemporaryDirectory() as folder:
            named = NamedReward(reward, "reward", "reward")
            score_to(Path(folder), named, Batch(prompts, responses), on_progress=lambda *_: None)

    works: dict[str, Callable[[int, int], None]] = {
        "bare": partial(bare, port),
        "rollouts": rollouts,
        "rewards": scores,
    }
    took: dict[tuple[str, int], float] = {}
    print(f"{'':10}{'in flight':>10}{'s a request':>13}{'over floor':>12}{'over one at a time':>20}")
    for name, work in works.items():
        work(1, 1)  # imports, and what libraries do once
        for in_flight, requests in ((1, 16), (16, 320), (32, 320)):
            took[name, in_flight] = a_request = seconds(partial(work, requests, in_flight)) / requests
            floor, ratio = a_request * in_flight / LATENCY, a_request / took[name, 1]
            print(f"{name:10}{in_flight:>10}{a_request:>13.4f}{floor:>12.3f}{ratio:>20.3f}")
    return int(max(took[name, 16] for name in works) > LIMIT * took["bare", 16])


if __name__ == "__main__":
    sys.exit(main())
