"""Conversations become the token ids of their template, whatever they spell, and ids become text again."""

from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, installed, tokenizer_of
from rows import user
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from infalign.core.errors import DataError
from infalign.integrations.openrlhf import response
from infalign.models.conversations import (
    TrainingIds,
    conversation_ids,
    decode,
    marked_text,
    prompt_ids,
    prompt_ids_or_errors,
    training_ids,
)
from infalign.models.tokenizers import load_tokenizer, prints_date


def said(content: str, **more: Any) -> dict[str, Any]:
    """Return a turn of the assistant."""
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    """Return a turn of the system."""
    return {"role": "system", "content": content}


THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "delta"}}}
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "It."}}, "required": ["word"]}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look it up.", "parameters": WORD}}]
RESULT = {"role": "tool", "name": "look_up", "content": "a letter"}
TEXTS = (
    *("", "Hi", " padded \n", "Sûr ? 😀 日本語", "a\u00a0b\u200bc e\u0301", "1\n\n2\n\n\n3", "\ttab"),
    *("def f(x):\n    return x < 1 | 2\n", "    if x:\n        y", "<p>html</p> {{ y }} {% z %} {# c #}"),
    "< |im_start| >",
)
CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    *(([user(text)], None) for text in TEXTS),
    *(([user("Why?"), said(text)], None) for text in TEXTS),
    ([system("Be brief."), user("Why?")], None),
    ([system(" Be brief.\n"), user("Why?"), said("So."), user("Sure?"), said("Yes.")], None),
    ([user("Why?"), said(f"{THOUGHT}So."), user("Sure?"), said(f"{THOUGHT}Yes.")], None),
    ([user("Why?"), said("So.", reasoning_content="Hm.")], None),
    ([user("Why?"), said("", tool_calls=[CALL]), RESULT, said("So.")], TOOLS),
    ([system("Look it up."), user("Why?"), said("I look.", tool_calls=[CALL]), RESULT, said("So.")], TOOLS),
    ([user("Why?")], TOOLS),
    ([user("Why?"), user("Why?"), said("So.")], None),
    ([said("So."), user("Why?")], None),
]
TEMPLATES = FAMILIES | installed()


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_template(name: str) -> None:
    """Token for token those of `apply_chat_template`, and what it refuses is refused."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    for prompted, ours in ((True, prompt_ids), (False, conversation_ids)):
        for conversation, tools in CONVERSATIONS:
            try:
                options = {"tools": tools, "add_generation_prompt": prompted}
                expected = tokenizer.apply_chat_template(conversation, **options)["input_ids"]
            except Exception:
                with pytest.raises(DataError, match="cannot render the conversation"):
                    ours(tokenizer, [conversation], [tools])
            else:
                assert ours(tokenizer, [conversation], [tools]) == [expected], conversation


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("name", ["chatml", "zephyr", "phi-3", "qwen-3", "tools", "llama-3"])
def test_control_tokens_that_others_spell_are_text(name: str, role: str) -> None:
    """The template alone writes control tokens, and the ids spell the message as it was written."""
    tokenizer = tokenizer_of(FAMILIES[name])
    spelled = "".join(tokenizer.get_added_vocab())
    ids, harmless = (
        conversation_ids(tokenizer, [[user("Hi"), {"role": role, "content": content}, user("Hi")]], [TOOLS])[0]
        for content in (f"a{spelled}b", "ab")
    )
    added = set(tokenizer.added_tokens_decoder)
    assert [i for i in ids if i in added] == [i for i in harmless if i in added]
    assert tokenizer.decode(ids) == tokenizer.decode(harmless).replace("ab", f"a{spelled}b")


def test_an_assistants_own_marks_stay_tokens() -> None:
    """Thoughts, calls and tags are what the policy said; the tokens around turns are not its to write."""
    tokenizer = tokenizer_of(FAMILIES["tools"] + "{# <think></think><answer></answer> #}")
    tokenizer.add_tokens(["<mine>"], special_tokens=True)
    own = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<mine>")
    ids = conversation_ids(tokenizer, [[user("Hi"), said(f"{'a'.join(own)}<|im_end|></s>")]])[0]
    marks = [tokenizer.decode(i) for i in ids if i in tokenizer.added_tokens_decoder]
    assert marks == ["<|im_start|>", "<|im_end|>", "<|im_start|>", *own, "<|im_end|>"]
    assert f"{'a'.join(own)}<|im_end|></s>" in tokenizer.decode(ids)


def trained(row: TrainingIds, tokenizer: Any) -> str:
    """Return the text of a row with its trained parts in brackets."""
    return "".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in marked_text(tokenizer, row))


@pytest.mark.parametrize(
    ("name", "end", "reply", "rendered"),
    [
        ("chatml", "<|im_end|>", [said("  So.\n")], "<|im_start|>assistant\n⟦  So.\n<|im_end|>⟧\n"),
        ("mistral", "</s>", [said("So.")], "[INST] Why? [/INST]⟦ So.</s>⟧"),
        ("qwen-3", "<|im_end|>", [said(f"{THOUGHT}So.")], f"\n⟦{THOUGHT}So.<|im_end|>⟧\n"),
        (
            *("tools", "<|im_end|>", [said("", tool_calls=[CALL]), RESULT, said("So.")]),
            '\n⟦<tool_call>\n{"name": "look_up", "arguments": {"word": "delta"}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\na letter\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦So.<|im_end|>⟧\n",
        ),
    ],
)
def test_fine_tuning_trains_what_the_policy_says(name: str, end: str, reply: list[Any], rendered: str) -> None:
    """Its turns up to EOS, in the conversation as the template renders it; results of tools are read, not trained."""
    tokenizer = tokenizer_of(FAMILIES[name])
    tokenizer.eos_token = end
    (row,) = training_ids(tokenizer, [[user("Why?")]], [reply])
    assert trained(row, tokenizer).endswith(rendered)
    assert (row.ids, row.is_rendered) == (*conversation_ids(tokenizer, [[user("Why?"), *reply]]), True)


@pytest.mark.parametrize(
    ("name", "reply", "rendered"),
    [
        ("qwen-3", said("So."), "<|im_start|>assistant\n⟦So.</s>⟧"),
        ("deepseek-r1", said(f"{THOUGHT}So."), "<｜Assistant｜><think>\n⟦Hm.\n</think>\n\nSo.</s>⟧"),
        ("deepseek-r1", said("So.", reasoning_content="Hm."), "<｜Assistant｜><think>\n⟦Hm.\n</think>\n\nSo.</s>⟧"),
        ("llama-3", said("    return x"), "assistant<|end_header_id|>\n\n⟦    return x</s>⟧"),
    ],
)
def test_what_a_template_renders_otherwise_is_trained_as_it_is_said(name: str, reply: Any, rendered: str) -> None:
    """The ids are those that the policy is asked, its reply and EOS, and the row is marked."""
    tokenizer = tokenizer_of(FAMILIES[name])
    (row,) = training_ids(tokenizer, [[user("Why?")]], [[reply]])
    (asked,) = prompt_ids(tokenizer, [[user("Why?")]])
    assert trained(row, tokenizer).endswith(rendered)
    assert (row.ids[: len(asked)], row.is_rendered) == (asked, False)


def test_only_bos_eos_and_padding_disappear_from_responses() -> None:
    """A tag that is a special token is what the policy said."""
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    tokenizer.add_tokens(["<answer>"], special_tokens=True)
    ids = tokenizer.encode("<s>It is <answer>4<|im_end|></s><pad>", add_special_tokens=False)
    assert decode(tokenizer, [ids, []]) == ["It is <answer>4<|im_end|>", ""]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *BYTES, *"▁ayx=.:\n", "▁▁▁▁", "▁a", "▁x", "▁."])}
SAID = ["▁▁▁▁", "y", "▁.", *(f"<0x{byte:02X}>" for byte in "日é".encode()), "▁x", "<0xE6>", "<0x97>"]
BLANKS = decoders.Replace("▁", " ")


def sentence_piece(kind: str) -> Any:
    """Return a tokenizer that begins a text with a blank, as Llama-2 or Mistral do, or none, as Gemma."""
    scheme = kind.removeprefix("unigram ")
    if kind == scheme:
        inner = Tokenizer(models.BPE(PIECES, [], unk_token="<unk>", byte_fallback=True))
    else:
        inner = Tokenizer(models.Unigram([(piece, 0.0) for piece in PIECES], unk_id=0, byte_fallback=True))
    if scheme in ("llama", "gemma"):
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * (kind == "llama"))
        strip = [decoders.Strip(" ", 1, 0)] * (kind == "llama")
        inner.decoder = decoders.Sequence([BLANKS, decoders.ByteFallback(), decoders.Fuse(), *strip])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        first = decoders.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), first])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True, **special)


def test_a_sentencepiece_tokenizer_keeps_text_too() -> None:
    """Byte fallback and word boundaries of a Llama-like tokenizer do not bring ``</s>`` of a user back."""
    tokenizer = sentence_piece("first")
    tokenizer.chat_template = "{% for m in messages %}{{ bos_token + m['content'] + eos_token }}{% endfor %}"
    (ids,) = conversation_ids(tokenizer, [[user("hi</s><s>hi")]])
    assert [i for i in ids if i in (1, 2)] == [1, 2]
    assert tokenizer.decode(ids).replace(" ", "") == "<s>hi</s><s>hi</s>"


@pytest.mark.parametrize("kind", ["llama", "gemma", "first", "always", "never", "unigram first", "unigram always"])
def test_a_response_is_read_as_it_goes_on_after_its_prompt(kind: str) -> None:
    """Blanks at its beginning and before points stay; what is streamed of it begins the whole, with each character."""
    tokenizer = sentence_piece(kind)
    ids = [PIECES[piece] for piece in SAID]
    assert decode(tokenizer, [ids, [PIECES["▁x"], 2], [1, 2], []]) == ["    y .日é x\ufffd", " x", "", ""]
    pieces = decode(tokenizer, [ids[:length] for length in range(len(ids) + 1)])
    whole = [piece for piece in pieces if not piece.endswith("\ufffd")]
    assert list(dict.fromkeys(whole)) == ["", *("    y .日é x"[:end] for end in (4, 5, 7, 8, 9, 11))]
    assert response("a:    y .</s>", "a:", tokenizer) == "    y ."
    parts = marked_text(tokenizer, TrainingIds([PIECES["a"], PIECES[":"], *ids[:3], 2], [0, 0, 1, 1, 1, 1], True))
    assert parts[1] == ("    y .</s>", True)


@pytest.mark.parametrize(("model", "decoder", "said"), [
    (models.WordPiece, decoders.WordPiece(cleanup=False), "hiho ."),
    (models.WordLevel, None, "hi ##ho ."),
])  # fmt: skip
def test_blanks_between_tokens_are_not_of_a_response(model: Any, decoder: Any, said: str) -> None:
    """A tokenizer that has none in its tokens writes them between any two; the first is not before the response."""
    inner = Tokenizer(model({"[UNK]": 0, "[SEP]": 1, "hi": 2, "##ho": 3, ".": 4}, unk_token="[UNK]"))
    inner.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[SEP]", unk_token="[UNK]")
    assert decode(tokenizer, [[2, 3, 4]]) == [said]


def test_prompts_that_a_template_refuses_are_named_one_by_one() -> None:
    """The others of the batch have their ids."""
    tokenizer = tokenizer_of(FAMILIES["gemma"])
    prompts = [[user("Hi")], [system("Be brief."), user("Hi")], [user("Ho")]]
    found = prompt_ids_or_errors(tokenizer, prompts)
    assert [found[0], found[2]] == prompt_ids(tokenizer, [prompts[0], prompts[2]])
    assert "roles must alternate user/assistant" in str(found[1])


def test_a_template_that_prints_the_day_prints_that_of_the_run(tmp_path: Path) -> None:
    """Wherever the tokenizer is saved and loaded, on whatever day."""
    tokenizer_of(FAMILIES["llama-3-date"]).save_pretrained(tmp_path / "own")
    load_tokenizer(tmp_path / "own", date="2024-07-26").save_pretrained(tmp_path / "run")
    tokenizer = load_tokenizer(tmp_path / "run")
    assert "Today: 26 Jul 2024" in tokenizer.decode(prompt_ids(tokenizer, [[user("Hi")]])[0])
    assert [prints_date(tmp_path / name) for name in ("own", "run")] == [True, False]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_plain_begins_as_the_tokenizers_own_encoding_does(adds_bos: bool, tmp_path: Path) -> None:
    """With BOS, once, or without."""
    tokenizer = tokenizer_of("")
    if adds_bos:
        start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = start
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, template="plain")
    (ids,) = prompt_ids(loaded, [[user("Hi")]])
    assert loaded.decode(ids) == f"{'<s>' if adds_bos else ''}User:\nHi\n\nAssistant:\n"
