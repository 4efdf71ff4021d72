"""How models are trained."""

from pydantic import Field, model_validator

from infalign.settings import Count, Positive, Settings


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


class RankModel(Settings):
    """A classifier trained to predict the rank Ĉ of a response, for prompts that have no rollouts.

    It starts from `model`; without it from the reward model, or from the reference policy if the reward is no model.
    """

    model: str | None = Field(None, description="folder or hub id")
    fit: Fit
