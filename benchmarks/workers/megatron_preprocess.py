"""Megatron-LM's tools/preprocess_data.py as it is, without the imports that need a GPU.

The script imports `megatron.core`, whose `__init__` imports the whole framework, Triton included, and the training
arguments, which do too. Here the packages are empty ones with the same search path, so that of Megatron's files exactly
those are loaded that the script uses: its tokenizers, its indexed dataset, and the defaults of its tokenizer arguments.

Usage: megatron_preprocess.py MEGATRON_CHECKOUT ARGUMENTS OF preprocess_data.py
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
import types
from dataclasses import fields
from pathlib import Path

PACKAGES = ("megatron", "megatron.core", "megatron.core.datasets", "megatron.training", "megatron.training.config")


def add_tokenizer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's own makes an option of every field; here two are options and the others keep their defaults."""
    config = importlib.import_module("megatron.training.config.training_config").TokenizerConfig
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--tokenizer-model")
    parser.set_defaults(**{field.name: field.default for field in fields(config)})
    return parser


def main() -> None:
    root = Path(sys.argv[1])
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    arguments = types.ModuleType("megatron.training.arguments")
    arguments.__dict__["_add_tokenizer_args"] = add_tokenizer_args
    sys.modules[arguments.__name__] = arguments
    importlib.import_module("megatron.core.parallel_state")  # first, as megatron.core does: it and utils are a circle
    sys.argv = [str(root / "tools/preprocess_data.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
