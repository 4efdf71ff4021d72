"""Tiny random policies, and a tokenizer of words."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

EOS = 3
PROMPT = [5, 1, 7, 2, 6]
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
SHAPE = HEADS | {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}


def tiny(family: str = "Llama", vocab_size: int = 40, *, seed: int = 1, **settings: Any) -> Any:
    """Return a random causal language model with a far from uniform distribution."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab_size, **SHAPE | SPECIAL | settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def words(vocab_size: int = 40, eos: str | None = f"w{EOS}") -> Any:
    """Return a tokenizer whose token i is the word ``wi``."""
    vocabulary = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    vocabulary.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token=eos)
