"""The model `tiny`: varied output, the same weights on every machine, a lossless tokenizer."""

from __future__ import annotations

import jinja2
import pytest
from model_helpers import greedy, load
from tokenizers import Tokenizer

TEXTS = [
    "",
    "Hello, world",
    "  two  spaces\n\n\ttabs\r\n ",
    "naïve Ω 漢字 🙂🏽 ",
    "<300> <|im_end|> <|endoftext|>",
    "".join(map(chr, range(1, 0x300))),
]


PROMPTS = [
    "Hello",
    "The capital of France is",
    "\n",
    "a b c d e f g h",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "the the the the the the",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_varies(prompt, make_cache):
    model = load("tiny")
    tokenizer = Tokenizer.from_str(model.tokenizer_json)
    tokens = greedy(model.transformer, make_cache(model.config), tokenizer.encode(prompt).ids, 60)
    assert len(set(tokens)) >= 20, tokens


def test_shape():
    config = load("tiny").config
    assert config.vocab_size == 512
    assert config.num_layers == 2
    assert config.context_length >= 4096
    assert not config.tie_embeddings


def test_weights_are_the_same_on_every_machine():
    model = load("tiny")
    weights = model.transformer.layers[1].down.weight
    assert abs(weights.std().item() * 128**0.5 - 1) < 0.01
    assert model.weights_digest == (
        "c4a3843baef3163dbe84b39a9f6550623383883b2e323fdf7f27d2d0567684f9"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_makes_a_round_trip(text):
    tokenizer = Tokenizer.from_str(load("tiny").tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_token_is_its_own_visible_text():
    tokenizer = Tokenizer.from_str(load("tiny").tokenizer_json)
    assert tokenizer.get_vocab_size() == 512
    fillers = [tokenizer.decode([token]) for token in range(259, 512)]
    assert len(set(fillers)) == len(fillers)
    assert fillers[0] == "<259>"


def test_chat_template():
    model = load("tiny")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = jinja2.Template(str(model.chat_template)).render(
        messages=messages, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer.from_str(model.tokenizer_json)
    assert tokenizer.encode(text).ids.count(model.eos_token_ids[0]) == 2
    assert tokenizer.token_to_id(str(model.eos_token)) == model.eos_token_ids[0]
