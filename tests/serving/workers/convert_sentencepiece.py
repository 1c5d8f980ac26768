"""llama.cpp's converter, made to read the SentencePiece model of a mixture of experts as it does that of a dense model.

Its Qwen3-MoE class takes vocabularies of GPT-2's form only, and of those only known ones.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

script = Path(sys.argv.pop(1))
sys.argv[0] = str(script)
sys.path.insert(0, str(script.parent))

from conversion import qwen  # noqa: E402

qwen.Qwen2MoeModel.set_vocab = qwen.Qwen2Model.set_vocab
runpy.run_path(str(script), run_name="__main__")
