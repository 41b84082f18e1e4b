"""An update rule with the options that it is measured and tested with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psstore.hyper import HYPER_DEFAULTS

Options = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One rule with the options that differ from torch's defaults."""

    rule: str
    options: Options

    def __str__(self) -> str:
        named = (f"{name}={value:g}" for name, value in self.options.items())
        return f"{self.rule}({', '.join(named)})"

    @property
    def hyper(self) -> dict[str, float]:
        return {**HYPER_DEFAULTS[self.rule], **self.options}


def state_names(case: Case) -> list[str]:
    """The state buffers that the rule keeps with these options, as torch names them."""
    hyper = case.hyper
    match case.rule:
        case "sgd":
            return ["momentum_buffer"] if hyper["momentum"] else []
        case "adam" | "adamw":
            return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if hyper["amsgrad"] else [])
        case "adagrad":
            return ["sum"]
        case "rmsprop":
            momentum = ["momentum_buffer"] if hyper["momentum"] else []
            return ["square_avg", *momentum] + (["grad_avg"] if hyper["centered"] else [])
        case "delayed_nesterov":
            return ["momentum_buffer", "gradient_sum"]
    return []
