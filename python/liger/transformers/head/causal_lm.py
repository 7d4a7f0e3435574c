# SPDX-License-Identifier: BSD-3-Clause
"""Recognition of models where the lm_head can compute the loss.

The trial calls the forward of the model between stand-ins for its other modules, which return artificial
hidden states, and an artificial head, and observes what reaches the loss function. Then it calls it again
with a head that computes the loss, and both must agree in the loss and in its gradient: in evaluation, in
training and with every argument below. What comes before the head does not matter: a patched model does it.
"""

import copy
import inspect

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_utils import PreTrainedModel

from ..recipe import trials
from .kind import kind_of
from .loss import CausalLMRecipe
from .loss_call import LOSS_KEYWORDS, HeadCall, LossCall
from .stand_ins import DEFAULTS, HIDDEN, CrossEntropies, Head, Stub, Undecided

CLASSES, TOKENS = 20, 5

# The maximum size of an artificial head's weight: 256 MiB.
MAX_ELEMENTS = 1 << 26

CHANGED = "between head and loss it changes the logits, or it computes its loss in another way"
READS = "between head and loss it uses the logits in a way in which the loss cannot take their place"
CHANGED_LABELS = "it changes the labels before its loss function"
ITSELF = "it calls torch's cross entropy itself, which only fused_linear_cross_entropy replaces"


def causal_lm(module, fused):
    """A recipe for the model, a reason, or None. ``fused``: the lm_head computes the loss."""
    if not isinstance(module, PreTrainedModel):
        return None
    # transformers uses the causal loss for every class name that it does not know.
    loss = LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss)
    if loss not in (ForCausalLMLoss, ForMaskedLMLoss):
        return None
    head = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(trials.original(module).forward).parameters:
        return None
    if getattr(module, "_loss_function", None) is not None:
        return "it has a loss function of its own"
    name = next((name for name, child in module.named_modules() if child is head), None)
    if name is None:
        return "its head is not one of its submodules"
    layers, _, reason = kind_of(head)
    if reason is not None:
        return reason if fused else CausalLMRecipe(name, fused=False, shift=loss is ForCausalLMLoss)
    linear = getattr(layers[0], "base_layer", layers[0])
    found = _Trial(module, name, linear, loss, CLASSES, False).result()
    if found in (trials.UNKNOWN, READS) and linear.out_features * HIDDEN < MAX_ELEMENTS:
        # The forward may read the shape of the logits, or cut off classes, which shows with all classes only.
        found = _Trial(module, name, linear, loss, linear.out_features, True).result()
    if fused:
        return found
    if getattr(found, "deferred", False):
        return ITSELF
    return CausalLMRecipe(name, fused=False, shift=loss is ForCausalLMLoss)


class _Trial:
    def __init__(self, module, head_name, linear, loss_function, classes, shaped):
        self.module, self.head_name = module, head_name
        self.loss_function, self.shaped = loss_function, shaped
        random = trials.Random()
        self.hidden = random.of_all_scales(TOKENS, HIDDEN).requires_grad_()
        self.head = Head(linear, random(classes, HIDDEN), None if linear.bias is None else random(classes))
        rows = len(trials.SCALES)
        generator = random.generator
        self.labels = torch.randint(CLASSES, (rows, TOKENS), generator=generator, device="cpu")
        self.labels[1, 2] = self.labels[2, 0] = -100
        self.shifted = torch.randint(CLASSES, (rows, TOKENS), generator=generator, device="cpu")
        self.mask = torch.ones_like(self.labels)
        self.mask[0, -2:] = self.mask[3, :2] = 0
        self.arguments = self._required(random)
        self.out_features = linear.out_features
        self.tensors = dict(self._tensors_of_classes(random))

    def _tensors_of_classes(self, random):
        """(name, artificial tensor) of each tensor with a number per class in the modules around the head."""
        module, prefix = self.module, ""
        for name in self.head_name.split("."):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                # ZeRO-3 partitions parameters and stores their shape in ds_shape.
                shape = () if tensor is None else getattr(tensor, "ds_shape", tensor.shape)
                if shape[-1:] == (self.out_features,) and shape.numel() == self.out_features:
                    yield prefix + key, random(*shape[:-1], len(self.head.weight))
            module, prefix = getattr(module, name), f"{prefix}{name}."

    def _required(self, random):
        """Arguments of the forward without a default."""
        found, parameters = {}, inspect.signature(trials.original(self.module).forward).parameters
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in list(parameters.items())[1:]:
            if name in ("input_ids", "decoder_input_ids"):
                found[name] = self.labels.clamp_min(0)
            elif parameter.default is parameter.empty and parameter.kind in kinds and name != "labels":
                pixels = "pixel" in name or "patches" in name
                found[name] = random(len(trials.SCALES), 3, 8, 8) if pixels else self.labels.clamp_min(0)
        if "pixel_values" in parameters:
            self.pixels = {"pixel_values": random(len(trials.SCALES), 3, 8, 8)}
        else:
            self.pixels = None
        return found

    def result(self):
        """A recipe or a reason."""
        with torch.enable_grad():
            try:
                return self._decide()
            except trials.ERRORS as error:
                return trials.no_trial(self.module, error)

    def _decide(self):
        seen = [self._observe(training=training) for training in (False, True)]
        if any(len(calls) != 1 or len(given) != 1 for calls, given, _, _ in seen):
            return CHANGED
        (x, logits), (training_x, _) = (calls[0] for calls, _, _, _ in seen)
        (recorded, labels, keywords, direct), _ = (given[0] for _, given, _, _ in seen)
        if x.shape[:-1] != self.labels.shape or not torch.equal(x, training_x):
            return CHANGED
        if labels is not self.labels:
            return CHANGED_LABELS
        if direct:
            return self._decide_direct(logits, recorded, keywords, seen)
        shift = self.loss_function is ForCausalLMLoss and keywords.get("shift_labels") is not self.labels
        own = {name for name in LOSS_KEYWORDS if keywords.get(name) is not None}
        if own - (set() if shift else {"shift_labels"}):
            return "it gives its loss function arguments of its own"
        classes = recorded.shape[-1]
        transform = _transform(logits.detach()[..., :classes], recorded.detach())
        if transform is None:
            return CHANGED
        passed = tuple(name for name, given in self._keywords(shift).items() if self._passes(name, given))
        cut = classes if classes < logits.shape[-1] else None
        scale, softcap = transform
        recipe = CausalLMRecipe(self.head_name, True, softcap, scale, passed, shift, cut, self.shaped)
        return self._rehearse(recipe, seen)

    def _decide_direct(self, logits, recorded, keywords, seen):
        """A recipe or a reason for a forward that calls torch's cross entropy."""
        if keywords != DEFAULTS:
            return "it gives the cross entropy options of its own"
        if recorded.numel() != logits.numel():
            return CHANGED
        logits, recorded = logits.detach(), recorded.detach().reshape(logits.shape)
        for added in (None, *self.tensors):
            total = logits if added is None else logits + self.tensors[added]
            transform = _transform(total, recorded)
            if transform is not None and transform[1] is None:
                recipe = CausalLMRecipe(
                    self.head_name, True, scale=transform[0], shift=False, deferred=True, added=added
                )
                return self._rehearse(recipe, seen)
        return CHANGED

    def _keywords(self, shift):
        """Arguments of the model by the keyword that they try."""
        every_label = self.labels.clamp_min(0)
        found = {
            "num_items_in_batch": {"num_items_in_batch": 7},
            "ignore_index": {"ignore_index": 3, "labels": every_label},
        }
        return {**found, "shift_labels": {"shift_labels": self.shifted}} if shift else found

    def _passes(self, name, arguments):
        """True if this keyword of the model reaches the loss function."""
        try:
            _, given, _, _ = self._observe(**arguments)
        except trials.ERRORS:
            return False
        return len(given) == 1 and given[0][2].get(name) is arguments[name]

    def _rehearse(self, recipe, seen):
        """The recipe if the loss and its gradient agree with the model for every argument, else a reason."""
        for training, (_, _, loss, grad) in zip((False, True), seen, strict=True):
            try:
                actual = self._patched_loss(recipe, {}, training)
            except trials.ERRORS:
                return READS
            if not _same(actual, (loss, grad)):
                return CHANGED
        for arguments in self._variants(recipe.shift):
            try:
                _, given, *expected = self._observe(training=True, **arguments)
            except trials.ERRORS:
                # The model does not take this argument, or needs a real backbone for it.
                continue
            if len(given) != 1 or not _same(self._patched_loss(recipe, arguments, True), expected):
                return f"with {' and '.join(arguments)} it computes another loss than its head would"
        return recipe

    def _variants(self, shift):
        yield from self._keywords(shift).values()
        yield {"num_items_in_batch": torch.tensor(5, device="cpu")}
        yield {"attention_mask": self.mask}
        yield {"return_dict": False}
        yield {"output_hidden_states": True}
        yield {"output_attentions": True}
        yield {"output_router_logits": True}
        yield {"use_cache": False}
        yield {"logits_to_keep": 2, "shift_labels": self.shifted[:, -2:]}
        if self.pixels is not None:
            yield self.pixels

    def _observe(self, training=False, **arguments):
        """([(input, output) of the head], [(logits, labels, keywords, direct) of each loss], loss, gradient).

        direct: the forward calls torch's cross entropy, not the loss function of the model.
        """
        given, labels = [], arguments.get("labels", self.labels)
        version = labels._version

        def direct(logits, target, keywords):
            if _is_view(target, labels) and labels._version == version:
                target = labels
            given.append((logits, target, keywords, True))

        recorder = CrossEntropies(direct, len(self.head.weight))

        def loss_function(logits, labels, vocab_size=None, **keywords):
            given.append((logits, labels, keywords, False))
            recorder.paused = True
            try:
                return self.loss_function(logits, labels, logits.shape[-1], **keywords)
            finally:
                recorder.paused = False

        with recorder:
            output = self._forward(self._model(loss_function, training), arguments)
        calls, self.head.calls = self.head.calls, []
        loss = _loss_of(output)
        if loss is None:
            return calls, [], None, None
        return calls, given, loss, torch.autograd.grad(loss, self.hidden)[0]

    def _patched_loss(self, recipe, arguments, training):
        """(loss, gradient of the hidden states) with a head that computes the loss."""
        keywords = {name: arguments[name] for name in recipe.keywords if name in arguments}
        labels = arguments.get("labels", self.labels)
        model = self._model(recipe.loss_function, training)
        call = LossCall(model, [self.head], labels, keywords, recipe)
        with HeadCall(call):
            output = self._forward(model, arguments)
        self.head.calls = []
        if recipe.deferred and not call.is_read:
            raise Undecided("it did not compute the cross entropy of its logits")
        loss = _loss_of(output)
        return loss, torch.autograd.grad(loss, self.hidden)[0]

    def _model(self, loss_function, training):
        attributes = {"_loss_function": loss_function, "training": training}
        return self._stand_in(self.module, self.head_name.split("."), attributes)

    def _forward(self, model, arguments):
        return type(model).forward(model, **{**self.arguments, "labels": self.labels, **arguments})

    def _stand_in(self, module, path, attributes, prefix=""):
        name, *rest = path
        own = {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.rpartition(".")[0] == prefix.rstrip(".")
        }
        config = getattr(module, "config", None)
        if config is not None:
            own["config"] = self._config(config)
        children = {
            key: Stub(child, self.hidden, len(self.head.weight))
            for key, child in module.named_children()
            if key != name
        }
        if rest:
            children[name] = self._stand_in(getattr(module, name), rest, attributes, f"{prefix}{name}.")
        else:
            children[name] = self.head
        return trials.stand_in(module, **trials.NO_HOOKS, **children, **attributes, **own)

    def _config(self, config):
        """A copy of a configuration with the vocabulary of the artificial head, and without the loss of
        routers, whose logits no stand-in has."""
        result = copy.copy(config)
        for name, value in vars(config).items():
            if name == "output_router_logits":
                vars(result)[name] = False
            elif name == "text_config" and hasattr(value, "__dict__"):
                vars(result)[name] = self._config(value)
            elif "vocab_size" in name and value == self.out_features:
                vars(result)[name] = len(self.head.weight)
        return result


def _is_view(target, labels):
    """True if two tensors have the same elements in the same memory."""
    return target.numel() == labels.numel() and target.data_ptr() == labels.data_ptr()


def _loss_of(output):
    return output["loss"] if isinstance(output, dict) else output[0]


def _same(actual, expected):
    """True if two pairs (loss, gradient of the hidden states) agree."""
    (loss, grad), (expected_loss, expected_grad) = actual, expected
    if loss.shape != expected_loss.shape or not torch.allclose(loss, expected_loss, rtol=1e-5):
        return False
    difference = (grad - expected_grad).abs().max()
    return bool(difference <= 1e-5 * expected_grad.abs().max())


def _transform(logits, recorded):
    """(scale, softcap or None) with ``recorded = softcap(scale * logits)``, or None if there are none."""
    if recorded.shape != logits.shape:
        return None
    if _close(recorded, logits):
        return 1.0, None
    # For the last scale a tanh is saturated.
    for cap in (None, recorded.abs().max().item()):
        scale = _scale(logits, recorded, cap)
        capped = scale * logits if cap is None else cap * torch.tanh(scale * logits / cap)
        if scale > 0 and _close(recorded, capped):
            return scale, cap
    return None


def _scale(logits, recorded, cap):
    """The factor of the logits, where they saturate no tanh; 0 if all do."""
    x, y = logits[:2].double(), recorded[:2].double()
    if cap is None:
        return _factor(x, y)
    within = y.abs() < 0.9 * cap
    return _factor(x[within], cap * torch.atanh(y[within] / cap)) if within.any() else 0.0


def _factor(x, y):
    """The factor between two tensors, by least squares: the roundings of many elements average out."""
    factor = ((x * y).sum() / (x * x).sum()).item()
    return 1.0 if abs(factor - 1) < 1e-7 else factor


def _close(results, expected):
    return trials.error(results, expected) <= 1
