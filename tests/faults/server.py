"""Servers on 127.0.0.1 that answer as reward and inference servers do, with faults when a script says so."""

import http.server
import json
import re
import socket
import threading
from collections.abc import Sequence
from typing import Any, Self

import torch

from infalign.sampling.engine import Sampling
from infalign.sampling.transformers import TransformersEngine
from infalign.world import gold

TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)


class Server:
    """Answers POSTs of JSON by `answer`; ``script`` holds faults for the next requests.

    A fault is a status, "reset", "hang", "trickle" (a byte every twentieth of a second), a status with an answer, or an
    answer: bytes as they are, a dictionary or list as JSON. Any other text is for `answer` to understand. With a
    ``meeting``, requests are answered once as many as its parties are there.
    """

    path = ""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.broken_after: int | None = None  # requests; then 503
        self.closing = threading.Event()
        self.meeting: threading.Barrier | None = None
        self.most_at_once = 0
        self.under_way: set[object] = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(self.headers)
                outer.under_way.add(self)
                outer.most_at_once = max(outer.most_at_once, len(outer.under_way))
                if outer.meeting is not None:
                    outer.meeting.wait(30)
                try:
                    self.answer(body)
                finally:
                    outer.under_way.discard(self)

            def answer(self, body: dict[str, Any]) -> None:
                broken = outer.broken_after is not None and len(outer.bodies) > outer.broken_after
                fault = 503 if broken else outer.script.pop(0) if outer.script else None
                if fault == "hang":
                    outer.closing.wait(10)
                elif fault == "reset":
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif isinstance(fault, int):
                    self.say(fault, {"error": f"bad key secret {'x' * 400}"})
                elif isinstance(fault, tuple):
                    self.say(*fault)
                elif fault is None or (isinstance(fault, str) and fault != "trickle"):
                    self.say(200, outer.answer(body, fault))
                else:
                    self.say(200, outer.answer(body, None) if fault == "trickle" else fault, slowly=fault == "trickle")

            def say(self, status: int, answer: Any, *, slowly: bool = False) -> None:
                outer.under_way.discard(self)  # before anybody can react to the answer
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                if not slowly:
                    self.wfile.write(data)
                for byte in data if slowly else b"":
                    if outer.closing.wait(0.05):
                        return
                    try:
                        self.wfile.write(bytes([byte]))
                    except OSError:  # nobody waits any more
                        return

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(http.server.ThreadingHTTPServer):
            request_queue_size = 128  # so many may connect at the same moment

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}{self.path}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, body: dict[str, Any], fault: str | None = None) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


class RewardServer(Server):
    """A reward server with OpenRLHF's contract that computes `gold`, times ``scale``."""

    path = "/get_reward"
    scale = 1.0

    def answer(self, body: dict[str, list[str]], fault: str | None = None) -> dict[str, Any]:
        """Return what gold says of the conversations that the prompts render."""
        conversations = [[{"role": m[1], "content": m[2]} for m in TURN.finditer(p)][:-1] for p in body["prompts"]]
        responses = [q.removeprefix(p) for q, p in zip(body["query"], body["prompts"], strict=True)]
        rewards = [self.scale * reward for reward in gold(conversations, responses)]
        return {"rewards": rewards, "scores": [0.0] * len(rewards), "extra_logs": {}}


class RolloutServer(Server):
    """A completions server that runs a model.

    Its own faults are "short" (half of the responses), "equal", "no ids", "no logprobs", or JSON that replaces fields
    of every response. A request draws the same again if its seed is the same.
    """

    computing = threading.Lock()  # the engine changes the model while it draws

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer

    def answer(self, body: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
        """Return the responses that the model draws, with what the script does to them."""
        engine = TransformersEngine(self.model, self.tokenizer, Sampling(body["max_tokens"], seed=body["seed"]))
        choices = []
        with self.computing:
            drawn = engine.sample(body["prompt"], "", range(body["n"]))
        for response in drawn:
            logprobs = token_logprobs(self.model, body["prompt"], response.token_ids)
            choices.append(
                {
                    "text": response.text,
                    "finish_reason": response.finish,
                    "token_ids": list(response.token_ids),
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {"token_logprobs": logprobs},
                }
            )
        if fault == "short":
            choices = choices[: len(choices) // 2]
        elif fault == "equal":
            choices = [max(choices, key=lambda choice: len(choice["token_ids"]))] * len(choices)
        elif fault is not None:
            fields = {"no ids": {"token_ids": None}, "no logprobs": {"logprobs": None}}.get(fault) or json.loads(fault)
            choices = [choice | fields for choice in choices]
        return {"choices": choices}


@torch.no_grad()
def token_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Return log-probabilities of a response's tokens by a plain forward pass."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
