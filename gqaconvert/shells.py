"""Stock models without weights, which are then read from the checkpoint: one layer at a time, or all of it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.planning import ConversionPlan, SiteWork
from gqaconvert.reading import SourceReader
from gqaconvert.site_merging import read_tensor


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made within it have parameters without memory; their buffers (rotary tables, scales) are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True)
class Shell:
    """A stock model without weights, and its decoder layers in the order of the plan's sites."""

    model: nn.Module
    layers: list[nn.Module]
    plan: ConversionPlan

    @classmethod
    def of(cls, config: Mapping[str, Any], plan: ConversionPlan) -> "Shell":
        """The model that a config describes, in float32; only what is computed and not stored holds numbers.

        Raises:
            UnsupportedModelError: it has no modules where the files have layers.
        """
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        typed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        model_class: Any = AutoModelForCausalLM._model_mapping[type(typed)]
        typed._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(typed, dtype=torch.float32)  # type: ignore[no-untyped-call]
        model.eval()
        return cls(model, _layers(model, plan), plan)

    def fill_outside(self, sources: SourceReader) -> None:
        """Load what stands before the layers: embeddings. What comes after them is never run."""
        plan = self.plan
        stack = layer_prefix(plan, plan.work[0]).rstrip(".").rpartition(".")[0] + "."
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        skipped = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        inputs = {id(parameter) for parameter in self.model.get_input_embeddings().parameters()}  # type: ignore[operator]
        for name, parameter in list(self.model.named_parameters()):
            if name.startswith(stack) or (id(parameter) in skipped and id(parameter) not in inputs):
                continue
            entry = plan.checkpoint.index.entries.get(name)
            if entry is None:
                raise not_singly(plan, f"no tensor {name}")
            parent, _, attribute = name.rpartition(".")
            loaded = nn.Parameter(read_float32(entry, sources), requires_grad=False)
            setattr(self.model.get_submodule(parent), attribute, loaded)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within it, the model passes explicit masks to its layers."""
        config: Any = self.model.config
        chosen = config._attn_implementation
        config._attn_implementation = "eager"
        try:
            yield
        finally:
            config._attn_implementation = chosen

    def filled(self, tensors: Mapping[str, Tensor]) -> "Shell":
        """The same with every parameter; ``tensors`` by their names in the checkpoint, shared if they fit as they are.

        Raises:
            UnsupportedModelError: the files' names are not those of the stock class, and its loader cannot map them.
        """
        model: Any = self.model
        found = {name: tensors[name] for name in model.state_dict() if name in tensors}
        model.load_state_dict(found, strict=False, assign=True)
        model.tie_weights()
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if missing:
            model = _loaded(type(model), model.config, tensors)
            if model is None:
                raise not_singly(self.plan, f"no tensor {missing[0]}")
            model.eval()
        model.requires_grad_(False)
        return Shell(model, _layers(model, self.plan), self.plan)

    def layer(self, number: int, weights: Mapping[str, Tensor]) -> nn.Module:
        """A copy of one layer with weights; names within the layer.

        Raises:
            UnsupportedModelError: the files' names are not those of the stock class, and its loader cannot map them.
        """
        layer = copy.deepcopy(self.layers[number])
        names = layer.state_dict().keys()
        if unknown := names - weights.keys():
            weights = self._as_modules(number, weights)
            if names - weights.keys():
                raise not_singly(self.plan, f"no {min(unknown)} in a layer")
        layer.load_state_dict({name: weights[name] for name in names}, strict=True, assign=True)
        return layer.requires_grad_(False)

    def _as_modules(self, number: int, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A layer's tensors under the modules' names, by the stock loader (it stacks the experts of mixtures).

        It is asked for a model of this one layer and a vocabulary of next to nothing.
        """
        config: Any = copy.deepcopy(self.model.config)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 8, None
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number]]
        prefix = layer_prefix(self.plan, self.plan.work[0])
        one: Any = _loaded(type(self.model), config, {f"{prefix}{name}": value for name, value in weights.items()})
        return {} if one is None else one.get_submodule(prefix.rstrip(".")).state_dict()


def _layers(model: nn.Module, plan: ConversionPlan) -> list[nn.Module]:
    try:
        return [model.get_submodule(layer_prefix(plan, work).rstrip(".")) for work in plan.work]
    except AttributeError:
        raise not_singly(plan, f"no module {layer_prefix(plan, plan.work[0])}") from None


def _loaded(model_class: Any, config: object, tensors: Mapping[str, Tensor]) -> Any | None:  # noqa: ANN401
    """The stock class with these tensors, None if its loader does not know what to do with them.

    What is missing outside the layers is made up by the loader, and not used.
    """
    from transformers.utils import logging

    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=torch.float32, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError):
        return None
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    inner = [name for kind in info.values() for name in kind if "layers." in str(name)]
    return None if inner else model


def layer_prefix(plan: ConversionPlan, work: SiteWork) -> str:
    """What a site's layer's tensors begin with, e.g. ``model.layers.3.``."""
    return work.site.prefix.removesuffix(f"{plan.family.attention}.")


def not_singly(plan: ConversionPlan, what: str) -> UnsupportedModelError:
    """The error for files that the stock class cannot take weight by weight."""
    return UnsupportedModelError(
        f"calibration loads layers one by one, and the files of this {plan.family.name} model are not named like the "
        f"modules of the stock class ({what})",
        hint="without --calibrate the merge uses the weights only",
    )


def read_float32(entry: TensorEntry, sources: SourceReader) -> Tensor:
    """A tensor of the source, widened."""
    return read_tensor(entry, sources).to(torch.float32)
