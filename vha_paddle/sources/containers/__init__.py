"""The file formats of other programs' checkpoints: which tensors a path holds, and their values one at a time.

Only bytes are understood here, no names: `open_container` tells the format by the files, and gives the tensors as they
are called and shaped there. Nothing in a file is executed: pickles are read by `stream.PickleStream`, which knows the
few records that Paddle and numpy write and refuses everything else.
"""

from vha_paddle.sources.containers.distcp import open_distcp
from vha_paddle.sources.containers.found import Container, open_container
from vha_paddle.sources.containers.merged import open_safetensors
from vha_paddle.sources.containers.pdparams import open_pdparams
from vha_paddle.sources.containers.stored import StoredTensor, StoredTensors

__all__ = [
    "Container",
    "StoredTensor",
    "StoredTensors",
    "open_container",
    "open_distcp",
    "open_pdparams",
    "open_safetensors",
]
