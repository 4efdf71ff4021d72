"""Models of random weights, and a tokenizer for any number of words, which need no download."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def word_tokenizer(size: int) -> Any:
    """Return a tokenizer of the words w0, w1, …, the last of which ends a response; a prompt is rendered as it is."""
    words = {f"w{number}": number for number in range(size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"w{size - 1}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, chat_template="{{ messages[0]['content'] }}"
    )


def words(ids: Any) -> str:
    """Return the text of some token ids."""
    return " ".join(f"w{number}" for number in ids)


def llama(vocabulary: int, hidden: int, layers: int, **more: Any) -> LlamaForCausalLM:
    """Return a random Llama in evaluation mode, always the same; ``more`` changes its configuration."""
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    end = {"eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": vocabulary, **shape, **end, **more})).eval()
