"""A value function that starts from a language model."""

from typing import Any

from peft import TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForTokenClassification

from infalign.models.settings import Fit
from infalign.training.common import lora


def critic_from(reference: str, fit: Fit) -> Any:
    """Return a copy of the reference with one value a token for its logits; with an adapter if the policy has one."""
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
        critic.train()  # else nothing is checkpointed
    config = lora(fit, TaskType.SEQ_CLS)  # the task whose head PEFT leaves out of "all linear layers" and trains whole
    return get_peft_model(critic, config) if config else critic
