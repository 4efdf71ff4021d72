"""Recipes: typed settings of a run, read from YAML, changed by ``--set key=value``."""

import difflib
import re
import shlex
from collections.abc import Callable
from copy import copy
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import numpy as np
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from infalign.errors import ConfigError, DataError
from infalign.evaluation import rewind_samples
from infalign.optimum import optimal
from infalign.procedures import BestOfN, Procedure, RewindAndRepeat, WorstOfN, parse_procedure
from infalign.shaping import Ranked, parse_shaping
from infalign.theory import law_at_kl


def _accepted_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a check that ``parse`` takes the text, so that its error comes with the key of the recipe."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    return AfterValidator(check)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Draws = Annotated[int, Field(ge=2, le=10_000)]  # of one prompt; what compares them grows with their square
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]  # also of files and folders
ProcedureName = Annotated[str, _accepted_by(parse_procedure)]
TransformName = Annotated[str, _accepted_by(parse_shaping)]
YAML_ERRORS = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
LONGEST_RECIPE = 100_000  # bytes
MOST_VALUES = 100_000  # of a recipe with its aliases written out
NOT_IN_TEXT = re.compile("[\0\ud800-\udfff]")  # what neither a file's name nor UTF-8 can have
TO_BEST_OF_N = ("bon-sft", "bonbon")  # solvers that aim at Best-of-n and have n for their strength
ON_POLICY = ("rloo", "ppo", "grpo", "maxk", "bond")
TAKES_PREDICTED_RANKS = ("rloo", "ppo", "grpo")  # they look at one reward a response, and at no reference rewards
OWN_TRANSFORM = {"bon-sft": "log", "bonbon": "log", "bond": "log", "ipo": "identity", "maxk": "identity"}
TAKEN = {"reference", "reward", "judge", "gold", "rank"}  # names of models that a run has besides its policies


def is_hub_id(model: str) -> bool:
    """Return whether a model that is no folder here can be one of the hub: ``owner/name``, or ``name``."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", model) is not None


class Settings(BaseModel):
    """Base of all settings: an unknown key is an error and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _means_itself(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"it is no switch, found {value} (YAML reads yes and on as true, no and off as false)")
        if isinstance(value, str) and NOT_IN_TEXT.search(value):
            raise ValueError(f"text with NUL or half a surrogate pair cannot be stored, found {_shown(value)}")
        return value


class Source(Settings):
    """Where rows come from: exactly one of a file, a dataset id or the built-in world."""

    path: str | None = Field(None, description="a .jsonl, .jsonl.gz, .parquet or .csv file")
    hub: str | None = Field(None, description="a `datasets` id, e.g. Anthropic/hh-rlhf, or a local dataset folder")
    split: str = Field("train", description="the split of `hub`")
    data_dir: str | None = Field(None, description="the folder inside `hub`, e.g. harmless-base")
    world: Count | None = Field(None, description="so many dialogues and preference pairs of the built-in world")
    limit: Count | None = Field(None, description="read at most so many rows")

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
        if sum(origin is not None for origin in (self.path, self.hub, self.world)) != 1:
            raise ValueError("give exactly one of path, hub, world")
        return self


class Data(Settings):
    """Preference pairs and demonstrations, and how they are shared out."""

    folder: str = Field(".", description="relative `path`s of sources start here")
    sources: Annotated[list[Source], Field(min_length=1)]
    test: list[Source] = Field([], description="test rows; without them `test_fraction` of `sources` is held out")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    judge_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of the training pairs that only the judge learns from"
    )
    skip_invalid: bool = Field(False, description="count and list invalid rows instead of stopping at the first")
    max_prompt_tokens: Count = Field(256, description="prompts with more tokens are dropped and counted")


class Scratch(Settings):
    """The shape of a small Llama trained from nothing, with a tokenizer trained on the data."""

    vocabulary: Annotated[int, Field(ge=300)] = 2048
    hidden: Count = 128
    layers: Count = 4
    heads: Count = 4
    context: Count = 512


class Lora(Settings):
    """Low-rank adaptation; the adapter is merged when the model is saved."""

    rank: Count = 16
    alpha: Positive = 32.0


class Fit(Settings):
    """How a model is trained."""

    epochs: Positive = 1.0
    batch_size: Count = Field(32, description="sequences (or pairs) an optimiser step")
    device_batch_size: Count | None = Field(None, description="of these at once on the device; default all")
    learning_rate: Positive = 1e-3
    max_length: Count = Field(512, description="longer rows are dropped and counted")
    bf16: bool = False
    gradient_checkpointing: bool = False
    lora: Lora | None = None

    @model_validator(mode="after")
    def _whole_accumulation(self) -> "Fit":
        if self.device_batch_size is not None and self.batch_size % self.device_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of the device's {self.device_batch_size}")
        return self


class Model(Settings):
    """A model: `model` (folder or hub id) or `scratch`, trained by `fit`; without `fit` it is used as it is."""

    model: str | None = None
    scratch: Scratch | None = None
    fit: Fit | None = None

    @model_validator(mode="after")
    def _one_start(self) -> "Model":
        if self.model is not None and self.scratch is not None:
            raise ValueError("give `model` or `scratch`, not both")
        return self


class PolicyModel(Model):
    """The policy before alignment; after `fit` (supervised fine-tuning) it is the reference policy."""

    @model_validator(mode="after")
    def _has_start(self) -> "PolicyModel":
        if (self.model is None) == (self.scratch is None):
            raise ValueError("give exactly one of `model`, `scratch`")
        if self.scratch is not None and self.fit is None:
            raise ValueError("a policy from `scratch` needs `fit`")
        return self


def _over_http(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError for a host that is none
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a URL starts with http:// or https:// and a host, found {url!r}")
    if parts.username is not None:
        raise ValueError("a URL with a password would be written into the run directory; use api_key_env")
    return url


class RewardSource(Model):
    """A Bradley–Terry classifier, a Python function or a server; without any it starts from the fine-tuned policy."""

    function: str | None = Field(None, description="package.module:function(prompts, responses) -> rewards")
    url: Annotated[str, AfterValidator(_over_http)] | None = Field(
        None, description="a reward server as OpenRLHF's: POST {query, prompts, labels} -> {rewards}"
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")

    @property
    def is_classifier(self) -> bool:
        """Whether it is a model that transformers loads."""
        return self.function is None and self.url is None

    @model_validator(mode="after")
    def _usable(self) -> "RewardSource":
        if self.function is not None and self.url is not None:
            raise ValueError("give `function` or `url`, not both")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is for a `url`")
        if not self.is_classifier and (self.model or self.scratch or self.fit):
            kind = "url" if self.function is None else "function"
            raise ValueError(f"a `{kind}` is used as it is: leave out model, scratch and fit")
        if self.is_classifier and self.model is None and self.fit is None:
            raise ValueError("a reward model that is no `function` and no ready `model` needs `fit`")
        return self


class RankModel(Settings):
    """A classifier trained to predict the rank Ĉ of a response, for prompts that have no rollouts.

    It starts from `model`; without it from the reward model, or from the reference policy if the reward is no model.
    """

    model: str | None = Field(None, description="folder or hub id")
    fit: Fit


def _splits(command: str) -> str:
    shlex.split(command)  # raises ValueError for a quotation without an end
    return command


class Engine(Settings):
    """What draws the rollouts."""

    kind: Literal["shared-prefix", "transformers", "server"] = "shared-prefix"
    url: str = Field("http://127.0.0.1:8000", description="an OpenAI-compatible server (kind: server)")
    command: Annotated[str, Field(min_length=1), AfterValidator(_splits)] | None = Field(
        None,
        description="starts the server for a model and is stopped afterwards; {model}, {port} and {seed} are filled in",
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")


class Rollout(Settings):
    """K responses for each training prompt, drawn from the reference policy at temperature 1, nothing truncated."""

    prompts: Annotated[int, Field(ge=4)] = 256
    k: Draws = Field(100, description="rollouts a prompt; a rank needs at least 2")
    max_new_tokens: Count = 64
    engine: Engine = Engine()


class Policy(Settings):
    """One aligned policy: a solver, a transformation and its strength: a KL budget, the paper's β, or Best-of-n's n.

    ``ipo`` optimises the identity transformation, and τ is its β. ``bon-sft`` and ``bonbon`` aim at Best-of-n, which is
    the transformation log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats. ``maxk`` climbs the win rate of the
    recipe's procedure itself and takes no transformation. ``bond`` has no β: it goes on until it has spent the budget.
    """

    solver: Literal["qrpo", "resample", "ipo", "bon-sft", "bonbon", "rloo", "ppo", "grpo", "maxk", "bond"] = "qrpo"
    transform: TransformName = Field(
        default_factory=lambda settings: OWN_TRANSFORM.get(str(settings.get("solver")), "identity"),
        description="of the rank; or raw, raw-prompt, par, lsc:0.85; default identity, or the solver's own",
    )
    kl_budget: Positive | None = Field(None, description="nats a response; the theory gives β")
    beta: Positive | None = Field(None, description="the paper's β, for the paper's raw Φ")
    n: Draws | None = Field(None, description="the n of Best-of-n (bon-sft, bonbon)")
    length_averaged: bool = Field(False, description="log-ratios a token, as TRL has them (ipo)")
    released_code: bool = Field(False, description="the loss of the authors' code, not of the paper (bonbon)")
    shipped: bool = Field(False, description="TRL's default settings, which replace Φ by another (grpo)")
    stored: bool = Field(False, description="one outer iteration on the K rollouts, which are its groups (grpo)")
    generations: Draws = Field(8, description="completions a prompt and step (on-policy solvers)")
    ranks: Literal["rollouts", "model"] = Field(
        "rollouts", description="model: as `rank_model` predicts them, on all training prompts (rloo, ppo, grpo)"
    )
    fit: Fit = Fit()

    @property
    def method(self) -> str:
        """What it optimises and by which solver: ``exp:10 (qrpo)``; a solver with an objective of its own: ``maxk``."""
        options = ("length_averaged", "released_code", "shipped", "stored")
        said = " ".join([self.solver, *(name.replace("_", "-") for name in options if getattr(self, name))])
        return said if self.solver in OWN_TRANSFORM else f"{self.transform} ({said})"

    @model_validator(mode="after")
    def _one_weight(self) -> "Policy":
        if self.solver in ON_POLICY and not self.stored and self.fit.batch_size % self.generations:
            raise ValueError(f"fit.batch_size {self.fit.batch_size} is no multiple of generations {self.generations}")
        if self.solver in TO_BEST_OF_N:
            if self.n is None or self.kl_budget is not None or self.beta is not None:
                raise ValueError(f"the strength of {self.solver} is n: give n, and neither kl_budget nor beta")
            return self
        if (self.kl_budget is None) == (self.beta is None):
            raise ValueError("give exactly one of kl_budget, beta")
        if self.solver == "bond" and self.beta is not None:
            raise ValueError("bond has no beta: give kl_budget, at which it stops")
        if self.solver == "bond" and self.fit.lora is not None:
            raise ValueError("bond moves a whole model as its anchor, not an adapter: leave fit.lora out")
        shaping = parse_shaping(self.transform)
        if self.kl_budget is not None and isinstance(shaping, Ranked):
            try:
                law_at_kl(shaping.transform, kl=self.kl_budget)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _of_its_solver(self) -> "Policy":
        own = OWN_TRANSFORM.get(self.solver, self.transform)
        if self.transform != own:
            raise ValueError(f"{self.solver} has the transformation {own}, not {self.transform}; leave transform out")
        for option, solvers in (
            ("n", TO_BEST_OF_N),
            ("length_averaged", ("ipo",)),
            ("released_code", ("bonbon",)),
            ("shipped", ("grpo",)),
            ("stored", ("grpo",)),
        ):
            if getattr(self, option) and self.solver not in solvers:
                raise ValueError(f"{option} is for the solver {' or '.join(solvers)}, found {self.solver}")
        return self

    @model_validator(mode="after")
    def _can_predict_ranks(self) -> "Policy":
        if self.ranks == "model":
            if self.solver not in TAKES_PREDICTED_RANKS or self.stored:
                found = "stored rollouts" if self.stored else self.solver
                raise ValueError(
                    f"ranks: model is for {', '.join(TAKES_PREDICTED_RANKS)} on fresh responses, found {found}"
                )
            if not isinstance(parse_shaping(self.transform), Ranked):
                raise ValueError(f"ranks: model needs a transformation of the rank, and {self.transform} is none")
        return self


class Evaluate(Settings):
    """Fresh samples of the base and of every policy on the test prompts."""

    prompts: Annotated[int, Field(ge=2)] = 128
    samples: Draws = 64
    max_n: Count = Field(16, description="Best-of-N and Worst-of-N for all N up to this")
    rewind: ProcedureName = "rewind:0.85:32"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95

    @model_validator(mode="after")
    def _enough_samples(self) -> "Evaluate":
        if self.max_n > self.samples:
            raise ValueError(f"Best-of-{self.max_n} cannot be estimated from {self.samples} samples")
        rewind = parse_procedure(self.rewind)
        if not isinstance(rewind, RewindAndRepeat):
            raise ValueError(f"`rewind` is spelled rewind:QUANTILE:N, found {self.rewind}")
        if rewind.name != self.rewind:
            raise ValueError(f"write {self.rewind} as {rewind.name}")
        if rewind_samples(rewind) > self.samples:
            raise ValueError(f"{self.rewind} needs {rewind_samples(rewind)} samples, found {self.samples}")
        return self


class Compute(Settings):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: Count = Field(1, description="worker processes for rollouts and models trained side by side (CPU)")
    threads: Count | None = Field(None, description="torch threads a process; default: torch decides")


class Recipe(Settings):
    """A whole run."""

    run_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    procedure: ProcedureName = Field("best-of-4", description="how the policy will be served")
    data: Data
    policy: PolicyModel
    reward: RewardSource
    judge: RewardSource = Field(description="only evaluates; never seen in training")
    gold: RewardSource | None = Field(None, description="a second judge: the truth, where it is known")
    rank_model: RankModel | None = Field(None, description="learns Ĉ from the rollouts, for policies with ranks: model")
    rollout: Rollout = Rollout()
    policies: Annotated[dict[Name, Policy], Field(min_length=1)]
    evaluate: Evaluate = Evaluate()
    compute: Compute = Compute()
    report_to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(
        ["tensorboard"], description="where training metrics go besides the console"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        procedure = parse_procedure(self.procedure)
        if self.procedure != procedure.name or self.procedure in ("best-of-1", "worst-of-1"):
            known = "standard" if self.procedure.endswith("-of-1") else procedure.name
            raise ValueError(f"write the procedure {self.procedure} as {known}")
        if isinstance(procedure, (BestOfN, WorstOfN)) and procedure.n > self.evaluate.max_n:
            raise ValueError(f"evaluate.max_n is {self.evaluate.max_n}, below the N of {self.procedure}")
        if isinstance(procedure, RewindAndRepeat):
            if self.procedure != self.evaluate.rewind:
                raise ValueError(
                    f"evaluate.rewind is {self.evaluate.rewind}; it must be the procedure, {self.procedure}"
                )
        else:
            try:
                procedure.weights(np.arange(self.evaluate.samples)[None])
            except DataError as error:
                raise ValueError(f"evaluate.samples: {error}") from error
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if self.policy.scratch is not None and longest > self.policy.scratch.context:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, and policy.scratch.context only "
                f"{self.policy.scratch.context}"
            )
        for name, policy in self.policies.items():
            if policy.n is not None and policy.n > self.rollout.k:
                raise ValueError(f"policies.{name}: the best of {policy.n} needs a rollout.k of at least {policy.n}")
            if policy.stored and policy.fit.batch_size % self.rollout.k:
                raise ValueError(
                    f"policies.{name}: fit.batch_size {policy.fit.batch_size} is no multiple of rollout.k "
                    f"{self.rollout.k}, its group"
                )
            if policy.ranks == "model" and self.rank_model is None:
                raise ValueError(f"policies.{name}: ranks: model needs the recipe's `rank_model`; add it, with `fit`")
            if policy.solver == "maxk":
                self._can_climb(name, policy, procedure)
        if taken := TAKEN & self.policies.keys():
            raise ValueError(f"a policy cannot be called {', '.join(sorted(taken))}, as another model of the run is")
        return self

    def _can_climb(self, name: str, policy: Policy, procedure: Procedure) -> None:
        """Raise ValueError unless maxk can estimate the gradient of ``procedure``."""
        if not isinstance(procedure, (BestOfN, WorstOfN)):
            raise ValueError(
                f"policies.{name}: maxk climbs best-of-N and worst-of-N, and the procedure is {procedure.name}"
            )
        if min(policy.generations, self.rollout.k) < procedure.n:
            raise ValueError(
                f"policies.{name}: {procedure.name} needs generations and rollout.k of at least {procedure.n}, found "
                f"{policy.generations} and {self.rollout.k}"
            )
        if policy.kl_budget is not None:
            try:
                optimal(procedure, kl=policy.kl_budget)
            except ConfigError as error:
                raise ValueError(f"policies.{name}: {error}") from error


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe and apply ``key.sub=value`` overrides (values are YAML).

    Raises ConfigError naming the file, the line of what is no YAML or stands there twice, the dotted key and, for an
    unknown key, the nearest known one.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_RECIPE + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the recipe {path} cannot be read: {said}; `infalign run --help` lists the recipes here"
        ) from error
    if len(content) > LONGEST_RECIPE:
        raise ConfigError(f"{path} is no recipe: it has more than {LONGEST_RECIPE:,} bytes")
    try:
        settings = _yaml(content.decode())
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not valid YAML: {_fault(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings; a recipe is a YAML mapping such as `run_dir: runs/demo`")
    for override in overrides or []:
        _apply(settings, override)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(e) for e in error.errors())) from error


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe with every default spelled out, as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, found {override!r}; for example --set rollout.k=16")
    try:
        value = _yaml(text)
    except YAML_ERRORS as error:
        raise ConfigError(f"--set {key}: {_shown(text)} is not a YAML value: {_fault(error)}") from error
    *parents, last = key.split(".")
    place: Any = settings
    for depth, parent in enumerate([*parents, last]):
        if isinstance(place, list):
            if parent not in map(str, range(len(place))):
                raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} is a list of {len(place)}; use its number")
            step: Any = int(parent)
        elif isinstance(place, dict):
            step = parent
        else:
            raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} has no keys")
        if depth == len(parents):
            place[step] = value
        else:
            inner = {} if isinstance(place, dict) and place.get(step) is None else place[step]
            place[step] = copy(inner)  # a YAML alias stands in several places, and only this one changes
            place = place[step]


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice, aliases cannot explode, and every fault has its line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node not in self._sizes:
            if node.end_mark is None:
                raise ComposerError(None, None, "an alias stands inside of what it repeats", node.start_mark)
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
                parts = list(chain.from_iterable(node.value))
            self._sizes[node] = 1 + sum(self._sizes[part] for part in parts)
            if self._sizes[node] > MOST_VALUES:
                said = f"more than {MOST_VALUES:,} values with all aliases written out"
                raise ComposerError(None, None, said, node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of the date 2024-13-01, !!bool x
            said = f"{_shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, said, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConstructorError(None, None, "a whole number of more than 64 bits", node.start_mark)
        return value


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise ComposerError(None, None, f"the key {_shown(key.value)} stands there twice", key.start_mark)
            seen.add(key.value)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _fault(error: Exception) -> str:
    """Return what is wrong with YAML, and in which line if that is known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        return f"line {error.problem_mark.line + 1}: {said}"
    return " ".join(str(error).split())


def _explain(error: ErrorDetails) -> str:
    """Say in one clause what is wrong with one key."""
    location = ".".join(str(part) for part in error["loc"] if part != "[key]")
    match error["type"]:
        case "extra_forbidden":
            known = _keys_at(error["loc"][:-1])
            near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
            return f"unknown key `{location}`; {hint}"
        case "missing":
            return f"`{location}` is missing"
        case "model_type":
            return f"`{location}` takes settings: {', '.join(_keys_at(error['loc']))}{_found(error)}"
        case "string_pattern_mismatch":
            return f"`{location}`: a name has letters, digits, - and _ only"
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
            return f"`{location}`: {message}" if location else message
        case _:
            return f"`{location}`: {error['msg']}{_found(error)}"


def _found(error: ErrorDetails) -> str:
    return f", found {_shown(error['input'])}" if isinstance(error["input"], (str, int, float, bool)) else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the settings at ``location``."""
    place: Any = Recipe
    for part in location:
        fields = getattr(place, "model_fields", None)
        place = fields[part].annotation if fields else get_args(place)[-1]  # of list[Source], dict[Name, Policy]
        if isinstance(place, UnionType):
            place = get_args(place)[0]  # of Lora | None
    return list(place.model_fields)
