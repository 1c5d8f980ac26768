"""The tensors of a directory in Hugging Face's layout, held to a model before any is read."""

from __future__ import annotations

from collections.abc import Collection

from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.names import Naming, account, check_shape, expected_tensors, hf_tensors
from vha_paddle.sources.base import WeightSpec
from vha_paddle.sources.containers import StoredTensors


def hf_specs(
    model: Model,
    stored: StoredTensors,
    naming: Naming,
    left_out: Collection[str],
    dtypes: Collection[str],
    dtype_rule: str,
) -> dict[str, WeightSpec]:
    """Every tensor of the model, by canonical name.

    Args:
        left_out: stored tensors that the model has no use for.
        dtypes: names of those that a tensor may have; all parts of one have the same.
        dtype_rule: what an error says of another one.

    Raises:
        UserError: the stored tensors are not exactly the model's, or one has another shape or dtype.
    """
    where = str(stored.path)
    expected = expected_tensors(model)
    parts = {name: hf_tensors(name, shape, naming) for name, shape in expected.items()}
    found = [there for there in stored.entries if there not in left_out]
    account(found, [there for of_one in parts.values() for there in of_one], where)
    specs = {}
    for name, shape in expected.items():
        for there, size in parts[name].items():
            check_shape(there, stored.entries[there].shape, size, where)
        held = sorted({str(stored.entries[there].dtype) for there in parts[name]})
        if len(held) > 1 or held[0] not in dtypes:
            raise UserError(f"{where}: {name} holds {', '.join(held)}; {dtype_rule}")
        specs[name] = WeightSpec(shape, stored.entries[next(iter(parts[name]))].dtype, tuple(parts[name]))
    return specs
