# SPDX-License-Identifier: BSD-3-Clause
"""The plugin of axolotl: its entry point, its key in the configuration, and the model that it patches."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

pytest.importorskip("transformers")
pydantic = pytest.importorskip("pydantic")

from liger.transformers import patch_report  # noqa: E402

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "axolotl.plugins"

FRAMEWORK = "axolotl"


def stand_in():
    """axolotl 0.21.0."""

    class BasePlugin:
        def get_input_args(self): ...

        def post_model_build(self, cfg, model): ...

    return {"axolotl.integrations.base": {"BasePlugin": BasePlugin}}


class Config(dict):
    """Keys are attributes, and missing ones are None, as in axolotl's DictDefault."""

    __getattr__ = dict.get


def registered():
    """The target of the entry point."""
    table = PROJECT.read_text().partition(f'[project.entry-points."{GROUP}"]\n')[2]
    return re.match(r'liger-ops = "([\w.]+):(\w+)"\n', table).groups()


def configured(plugin, value):
    """The configuration that a plugin gets for ``liger_ops: value``, as axolotl merges and dumps it."""
    module, _, name = plugin.get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)

    class Merged(arguments):
        base_model: str = "llama"

    return Config(Merged(liger_ops=value).model_dump(exclude_none=True))


def test_the_entry_point_leads_to_the_plugin(integration):
    module, name = registered()
    assert module == integration.__name__
    assert issubclass(getattr(importlib.import_module(module), name), integration.BasePlugin)


def test_the_model_is_patched_with_the_options(integration):
    plugin = integration.LigerOpsPlugin()
    for value, recomputed in ((True, False), ({"recompute": True, "rope": False}, True)):
        model = tiny_models.make("llama")
        plugin.post_model_build(configured(plugin, value), model)
        report = patch_report(model)
        assert report.replaced
        assert ("rope" in str(report)) is not recomputed


def test_without_the_key_nothing_changes(integration):
    plugin = integration.LigerOpsPlugin()
    model = tiny_models.make("llama")
    for cfg in (Config(), configured(plugin, False)):
        plugin.post_model_build(cfg, model)
        assert not patch_report(model).replaced


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ropes": True}, "there is no option 'ropes'. Did you mean rope?"),
        ({"rope": 1}, "the option rope is 1, expected True or False"),
        ({"tiled_mlp_num_shards": 2}, "only together with tiled_mlp=True"),
    ],
    ids=str,
)
def test_wrong_options_are_errors_of_the_configuration(integration, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        integration.LigerOpsArgs(liger_ops=options)


@pytest.mark.parametrize("integration", ["installed"], indirect=True)
def test_axolotl_finds_and_merges_the_plugin(integration):
    """What only axolotl itself does: it loads the plugin by name, and merges its key into a schema that takes
    tensor parallelism with it."""
    config = {
        "base_model": "llama",
        "datasets": [{"path": "data", "type": "alpaca"}],
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "tensor_parallel_size": 2,
        "plugins": [":".join(registered())],
        "liger_ops": {"recompute": True},
    }
    dictionary = importlib.import_module("axolotl.utils.dict").DictDefault
    functions = importlib.import_module("axolotl.utils.config")
    functions.prepare_plugins(dictionary(config))
    manager = importlib.import_module("axolotl.integrations.base").PluginManager.get_instance()
    validated = functions.validate_config(dictionary(config))
    assert validated.tensor_parallel_size == 2
    model = tiny_models.make("llama")
    manager.post_model_build(validated, model)
    assert patch_report(model).replaced
    with pytest.raises(TypeError, match="ropes"):
        functions.validate_config(dictionary(config | {"liger_ops": {"ropes": True}}))


@pytest.mark.slow
def test_tensor_parallel_loss_and_gradients(tmp_path):
    """Two processes: the loss comes from the shards of the lm_head."""
    pytest.importorskip(FRAMEWORK)
    tiny_models.make("llama").save_pretrained(tmp_path)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(Path(__file__).with_name("two_ranks_axolotl.py"), tmp_path),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
