# SPDX-License-Identifier: BSD-3-Clause
"""examples/finetune_qwen3.py on a tiny Qwen3 and a file of conversations, without a network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_qwen3.py"
if not EXAMPLE.is_file():
    pytest.skip("no examples beside the tests", allow_module_level=True)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=special[:1],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    turns = [("user", "count"), ("assistant", "one two three four")]
    rows = [{"messages": [{"role": r, "content": f"{c} {i % 3}"} for r, c in turns]} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_qwen3", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(model, chats, out, *options):
    command = [
        sys.executable,
        EXAMPLE,
        "--model",
        model,
        "--data",
        chats,
        "--output_dir",
        out,
        "--length",
        "128",
    ]
    command += [
        "--held_out",
        "4",
        "--max_steps",
        "6",
        "--learning_rate",
        "1e-2",
        "--report_to",
        "none",
        *options,
    ]
    command += ["--use_cpu", "true", "--save_strategy", "no", "--logging_steps", "2"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (
        float(re.search(f"loss {when}: ([\\d.]+)", done.stdout)[1]) for when in ("before", "after")
    )
    assert after < before - 0.1
    assert "lm_head and loss" in done.stdout
    return before


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_it_learns_and_saves(model, chats, tmp_path, full):
    run(model, chats, tmp_path, "--full", str(full).lower())
    saved = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer_config.json", "model.safetensors" if full else "adapter_model.safetensors"} <= saved
    if full:
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3"


def test_the_answer_alone_has_labels(example):
    words = tokenizer()
    chat = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d e"},
    ]  # fmt: skip
    ids, labels = example.tokens_of(chat, words, 1000)
    assert words.decode(ids) == words.apply_chat_template(chat, tokenize=False)
    assert words.decode([t for t in labels if t != -100]) == "d e<|im_end|>\n"
    with pytest.raises(ValueError, match="ends with a message of user"):
        example.tokens_of(chat[:3], words, 1000)


def test_packed_conversations_have_the_loss_of_each_alone(example, model):
    words = tokenizer()
    chats = [
        [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y" * (n + 2)}]
        for n in (3, 9, 5)
    ]
    examples = [example.tokens_of(chat, words, 1000) for chat in chats]
    llm = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()

    def loss(bins):
        sums = count = 0
        for row in bins:
            batch = {name: torch.tensor([values]) for name, values in row.items()}
            valid = (batch["labels"][:, 1:] != -100).sum()
            sums += llm(**batch, use_cache=False).loss * valid
            count += valid
        return sums / count

    together, apart = example.packed(examples, 1000), example.packed(examples, 1)
    assert (len(together), len(apart)) == (1, 3)
    with torch.no_grad():
        torch.testing.assert_close(loss(together), loss(apart), rtol=1e-5, atol=1e-5)
