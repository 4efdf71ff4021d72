"""Models from scratch: a tokenizer trained on the run's own text and a small Llama."""

from collections.abc import Iterable
from typing import Any

from infalign.models.settings import Scratch, attention_heads

ROLES = ("system", "user", "assistant")
END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-level BPE of the library tokenizers that is trained on ``texts``; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(texts: Iterable[str], scratch: Scratch) -> Any:
    """Return a fast tokenizer of transformers with a chat template, the BPE of which is trained on ``texts``."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, scratch.vocabulary),
        pad_token=PAD,
        eos_token=END,
        model_max_length=scratch.context,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_policy(scratch: Scratch, tokenizer: Any, *, seed: int) -> Any:
    """Return a freshly initialized Llama for the tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=scratch.hidden,
            intermediate_size=3 * scratch.hidden,
            num_hidden_layers=scratch.layers,
            num_attention_heads=attention_heads(scratch.hidden, width=32),
            max_position_embeddings=scratch.context,
            tie_word_embeddings=True,
            initializer_range=0.7 / scratch.hidden**0.5,  # the usual 0.02 suits widths in the thousands
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
