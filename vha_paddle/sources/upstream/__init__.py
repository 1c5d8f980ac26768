"""Virtual head attention checkpoints of other projects: PaddleFleet's core, its research fork, and their exports.

They share tensor names and differ in what the names mean. Here a kind is told by names and shapes, compared with the
configuration, and every stored tensor is given its place in a model of this package, or a reason to be left out.
docs/upstream.md has the table.
"""

from vha_paddle.sources.upstream.kinds import map_among
from vha_paddle.sources.upstream.orders import GateOrder, NormOrder
from vha_paddle.sources.upstream.reader import open_upstream

__all__ = ["GateOrder", "NormOrder", "map_among", "open_upstream"]
