"""The update rules' hyper-parameters by name. Imports nothing, so that kernels run where only the extension does."""

from __future__ import annotations

from collections.abc import Mapping

HYPER_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "assign": {},
    "add": {},
    "sgd": {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": 0.0,
        "weight_decay": 0.0,
        "maximize": 0.0,
    },
    "adam": {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": 0.0,
        "maximize": 0.0,
    },
    "adamw": {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": 0.0,
        "maximize": 0.0,
    },
    "adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "maximize": 0.0,
    },
    "rmsprop": {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": 0.0,
        "maximize": 0.0,
    },
    "reduce": {},
    "delayed_nesterov": {"lr": 0.7, "momentum": 0.9, "every": 4.0, "activation": 0.0},
}
"""Names and defaults per rule: those of the class of the same name, of torch.optim or psstore.torch; flags are 0.0 or
1.0."""

COUNTED = frozenset({"adam", "adamw", "adagrad", "rmsprop", "delayed_nesterov"})
"""Rules whose class has the number of steps in a tensor's state, beside its buffers: a 0-d float32 tensor."""

ROW_HYPER_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "sparse_sgd": {"lr": 1e-3, "maximize": 0.0},
    "sparse_adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "maximize": 0.0,
    },
    "rowwise_adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.0, "eps": 1e-8, "maximize": 0.0},
    "sparse_adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "maximize": 0.0},
    "sparse_momentum": {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0, "maximize": 0.0},
    "ftrl": {
        "lr": 1e-3,
        "lr_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1": 0.0,
        "l2": 0.0,
        "l2_shrinkage": 0.0,
        "beta": 0.0,
        "maximize": 0.0,
    },
}
"""Names and defaults of the rules of rows: torch.optim's where torch has the rule, but for a momentum that is one;
FBGEMM's of rowwise_adagrad; TensorFlow's names (SparseApplyFtrlV2) and Keras' defaults of ftrl."""
