"""Small models of random weights, built once a run, and the real one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub; set before it is imported


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 384 tokens, trained on a page of CPython's help."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["assignment"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)


def save_model(folder: Path, model: Any) -> Path:
    """The folder that `load` reads, tokenizer included."""
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_llama_config(**changes: Any) -> Any:
    """Two layers of grouped-query attention, 64 wide: sizes that every kernel can tile."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # large enough for attention to matter
    }
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 100,000 random weights, float32, tied head."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return save_model(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(tiny_llama_config()))


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a GPT-2: Conv1D instead of Linear, biases, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=384, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    )
    return save_model(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel(config))


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return save_model(tmp_path_factory.mktemp("bert"), BertModel(config))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The real model by name; downloaded into the user's cache the first time."""
    from featherweight.models import load

    load("smollm2-135m")
    return "smollm2-135m"
