"""A value function that starts from a language model."""

from typing import Any

from peft import TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForTokenClassification

from infalign.models.settings import Fit
from infalign.training.common import lora_config


def critic_from(reference: str, fit: Fit) -> Any:
    """Return a copy of the reference that outputs one value per token; with an adapter if the policy has one."""
    shape = AutoConfig.from_pretrained(reference, num_labels=1)
    shape.classifier_dropout = 0.0
    critic = AutoModelForTokenClassification.from_pretrained(
        reference,
        config=shape,
        use_safetensors=True,
        trust_remote_code=False,
        dtype="float32",
    )
    if fit.gradient_checkpointing:
        critic.activation_checkpointing_enable()
        critic.train()  # activations are checkpointed only in training mode
    config = lora_config(
        fit, TaskType.SEQ_CLS, shape
    )  # a task for which PEFT trains the head fully, without an adapter
    return get_peft_model(critic, config) if config else critic
