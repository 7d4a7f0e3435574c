# SPDX-License-Identifier: BSD-3-Clause
"""One rank of two that load a model through axolotl with tensor parallelism and the plugin, and compare loss
and gradients with the plain model: test_axolotl.py starts it by torchrun. The mesh is on the CPU, where
axolotl itself would take CUDA devices."""

import sys

import torch
import torch.distributed as dist
from axolotl.loaders import model as loaders
from axolotl.utils import distributed
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from liger.transformers import patch_report


def on_cpu(cfg):
    sizes = distributed._get_parallel_config_kwargs(2, cfg.tensor_parallel_size)
    parallelism = distributed.ParallelismConfig(**sizes)
    return parallelism, parallelism.build_device_mesh("cpu")


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(path):
    dist.init_process_group("gloo")
    loaders.build_parallelism_config = on_cpu
    settings = DictDefault(
        base_model=path,
        datasets=[{"path": "none.jsonl", "type": "chat_template"}],
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=1e-4,
        tensor_parallel_size=2,
        plugins=["liger.integrations.axolotl.LigerOpsPlugin"],
        liger_ops=True,
        bf16=False,
        fp16=False,
        attn_implementation="sdpa",
        world_size=2,
    )
    prepare_plugins(settings)
    cfg = validate_config(settings)
    # What axolotl's normalisation finds out from devices and the Hub.
    cfg.update(
        torch_dtype=torch.float32, type_of_model="AutoModelForCausalLM", device="cpu", device_map="cpu",
        base_model_config=path, model_config_type="llama", local_rank=dist.get_rank(),
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    words = {str(i): i for i in range(plain.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0")))
    model, _ = loaders.ModelLoader(cfg, tokenizer).load()
    ids = torch.randint(plain.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for each in (model, plain):
        out = each.train()(input_ids=ids, labels=ids)
        out.loss.backward()
        losses.append(full(out.loss))
        assert (out.logits is None) == (each is model)
    torch.testing.assert_close(*losses)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), expected[name].grad, rtol=1e-4, atol=1e-6)
    assert "vocab_parallel_fused_linear_cross_entropy" in str(patch_report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
