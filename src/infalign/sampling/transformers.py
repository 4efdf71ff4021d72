"""Draw responses with transformers' ``generate``, which takes any causal language model."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, Literal

from infalign.core.errors import ConfigError
from infalign.models.policy import AnyModel, loaded
from infalign.models.settings import Compute
from infalign.sampling.engine import (
    UNDEFINED_POLICY,
    Draw,
    Engine,
    EngineSettings,
    OpenEngine,
    Prompt,
    Response,
    Sampling,
    Vocabulary,
    check_prompt,
    pick_tokens,
    token_uniforms,
)


class TransformersEngine(Engine):
    """Draws responses of any causal language model, with the same random streams as `SharedPrefixEngine`.

    Nothing in the model's ``generation_config`` applies: ``generate`` gets a fresh one, and a logits processor that
    fixes each token.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.vocabulary, self.sampling = model, Vocabulary.of(model, tokenizer), sampling
        self.device_type = model.device.type

    def sample_together(self, draws: Sequence[Draw]) -> list[Response]:
        """Return the rollouts, in the order of ``draws``; those of a prompt are drawn in one batch."""
        by_prompt = groupby(draws, lambda draw: (draw[0].prompt_id, tuple(draw[0].token_ids)))  # tools count
        return [response for _, group in by_prompt for response in self._sample(list(group))]

    def _sample(self, draws: Sequence[Draw]) -> list[Response]:
        import torch
        from transformers import GenerationConfig

        prompt, indices = draws[0][0], [index for _, index in draws]
        check_prompt(prompt, self.model, self.sampling)
        uniforms = torch.from_numpy(token_uniforms(self.sampling, prompt.prompt_id, indices)).to(self.model.device)
        inputs = torch.tensor([list(prompt.token_ids)] * len(indices), device=self.model.device)
        absent = self.vocabulary.absent_on(self.model.device)
        logprobs = list[torch.Tensor]()

        def pick(so_far: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            now = uniforms[:, so_far.shape[1] - inputs.shape[1]]
            tokens, logprob = pick_tokens(logits, now, absent, [self.sampling.greedy] * len(indices))
            logprobs.append(logprob)
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        fresh = GenerationConfig(
            max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=self.vocabulary.ends,
            pad_token_id=self.vocabulary.eos,
            do_sample=False,  # greedy: `pick` leaves one token to choose from
            num_beams=1,
            use_cache=True,
            repetition_penalty=1.0,
        )
        folder, self.model.generation_config = self.model.generation_config, fresh
        try:
            with torch.no_grad():
                out = self.model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), generation_config=fresh, logits_processor=[pick]
                )
        finally:
            self.model.generation_config = folder
        tokens = out[:, inputs.shape[1] :]
        ending = torch.isin(tokens, torch.tensor(self.vocabulary.ends, device=tokens.device)).long()
        before_end = ending.cumsum(dim=1) - ending == 0
        sums = torch.stack(logprobs, dim=1).where(before_end, 0.0).sum(dim=1)
        lengths = before_end.sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        if not sums.isfinite().all():
            raise ConfigError(UNDEFINED_POLICY)
        return self.vocabulary.responses(ids, sums.tolist())


class Settings(EngineSettings):
    """transformers' own sampler, which is slower and takes every model."""

    kind: Literal["transformers"] = "transformers"

    def open(self, model: AnyModel, sampling: Sampling, compute: Compute, probe: Prompt) -> OpenEngine:
        """Return the engine on the loaded model. Raises ConfigError for a model that it cannot sample from."""
        return nullcontext(TransformersEngine(*loaded(model, compute), sampling))
