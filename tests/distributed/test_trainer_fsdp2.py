"""The Trainer with accelerate's FSDP2 plugin: loss and weights of a patched model after some steps."""

import families
import pytest
import ranks
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

STEPS, MICRO_BATCHES = 2, 2
NAMES = ["qwen3", "gemma2", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"]


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths, some of which have few labels."""

    def __len__(self):
        return 2 * ranks.WORLD * MICRO_BATCHES * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, families.IMAGE_TOKEN, (12 + index % 4,), generator=generator)
        labels = ids.clone()
        labels[: 2 + index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.stack(
            [torch.nn.functional.pad(r[name], (0, length - len(r[name])), value=value) for r in rows]
        )

    ids, labels = padded("input_ids", 0), padded("labels", -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def reset():
    """accelerate has one state in a process, which the first Accelerator determines."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    if not ranks.ON_GPU:
        # accelerate shards on accelerators only, though its FSDP2 code runs on CPUs.
        original = AcceleratorState.__init__

        def init(self, *args, fsdp_plugin=None, **kwargs):
            original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
            if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
                if self._mixed_precision != "no":
                    fsdp_plugin.set_mixed_precision(self._mixed_precision)

        monkeypatch.setattr(AcceleratorState, "__init__", init)
    yield
    reset()


class Trainer(transformers.Trainer):
    """Keeps the micro-batches of this rank."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), families.to(inputs, "cpu")]
        return super().training_step(model, inputs, *args, **kwargs)


def train(model, folder, **options):
    """(the :class:`families.Result` without gradients, the micro-batches of this rank)."""
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "use_cpu": not ranks.ON_GPU, "learning_rate": families.LEARNING_RATE, "optim": "sgd",
        "optim_args": f"momentum={families.MOMENTUM}", "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
        "dataloader_pin_memory": False, "disable_tqdm": True, "seed": 1, "fsdp": True,
    }  # fmt: skip
    reset()
    before = families.weights_of(model)
    arguments = transformers.TrainingArguments(**{**settings, **options})
    trainer = Trainer(model, arguments, train_dataset=Rows(), data_collator=collate)
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule)
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    after = families.weights_of(trainer.model_wrapped)
    return families.result(losses, [{}], before, after), trainer.seen


def steps_of(seen):
    """The steps of :func:`families.exactly` from the micro-batches of this rank."""
    of_ranks = [None] * ranks.WORLD
    torch.distributed.all_gather_object(of_ranks, seen)
    steps = []
    for start in range(0, STEPS * MICRO_BATCHES, MICRO_BATCHES):
        inputs = [x for of_rank in of_ranks for x in of_rank[start : start + MICRO_BATCHES]]
        count = sum(int((x["labels"][:, 1:] != -100).sum()) for x in inputs)
        more = {"num_items_in_batch": count / ranks.WORLD, "use_cache": False}
        steps.append(
            [
                {
                    "input_ids": x["input_ids"],
                    "attention_mask": x["attention_mask"],
                    "labels": x["labels"],
                    **more,
                }
                for x in inputs
            ]
        )
    return steps


def run(name, folder, tied=None, dtype=torch.float32, make=families.make, **options):
    theirs, seen = train(make(name, tied), folder, **options)
    model = families.patched(make(name, tied), name)
    ours, again = train(model, folder, **options)
    families.assert_patched(model, name)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(seen, again, strict=True))
    exact = families.exactly(families.make(name, tied), steps_of(seen))
    families.assert_as_exact(ours, theirs, exact._replace(first={}, last={}), dtype)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", NAMES)
def test_float32(name, reshard, tmp_path):
    run(name, tmp_path, fsdp_config={"reshard_after_forward": reshard})


@pytest.mark.parametrize("checkpointing", [False, True], ids=["activations", "checkpointing"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name, checkpointing, tmp_path):
    config = {"activation_checkpointing": checkpointing}
    run(name, tmp_path, dtype=torch.bfloat16, bf16=True, fsdp_config=config)


@pytest.fixture
def liger_kernel(monkeypatch):
    """Makes that name importable, in front of a package that is installed."""
    monkeypatch.setenv("LIGER_COMPAT_OVERRIDE", "1")
    import liger.compat

    try:
        liger.compat.install()
    except ImportError as error:
        pytest.skip(str(error))
    yield
    liger.compat.uninstall()


@pytest.mark.usefixtures("liger_kernel")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_use_liger_kernel(name, tmp_path):
    """The Trainer patches the model itself, before it shards it."""
    theirs, seen = train(families.make(name), tmp_path)
    model = families.make(name)
    ours, _ = train(model, tmp_path, use_liger_kernel=True)
    families.assert_patched(model, name)
    exact = families.exactly(families.make(name), steps_of(seen))
    families.assert_as_exact(ours, theirs, exact._replace(first={}, last={}))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["activations", "checkpointing"])
def test_layers_of_two_kinds(checkpointing, tmp_path):
    """Layers with linear and with full attention have one class in transformers, and each is a unit."""
    model = families.patched(families.make("qwen3_next"), "qwen3_next")
    layers = [m for m in model.modules() if type(m).__name__ == "Qwen3NextDecoderLayer"]
    assert len({type(layer) for layer in layers}) == len(layers) == 2
    config = {"activation_checkpointing": checkpointing}
    run("qwen3_next", tmp_path, fsdp_config=config)
    train(model, tmp_path, fsdp_config=config)
    assert all(isinstance(layer, FSDPModule) for layer in layers)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_or_not(name, tmp_path):
    """The other choice than the configuration of the family makes: accelerate makes other units."""
    run(name, tmp_path, tied=name == "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_of_the_model(name, tmp_path):
    run(name, tmp_path, gradient_checkpointing=True)


@pytest.mark.parametrize("name", NAMES)
def test_loading_on_one_rank(name, tmp_path):
    """accelerate moves the patched model to the meta device, shards it, and loads it from rank 0."""
    run(name, tmp_path, fsdp_config={"cpu_ram_efficient_loading": True})
