"""Use folders for transformers where this project cannot be imported; run by `python -I`.

Arguments: a JSON file with the task, and the path of the results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def results(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer(text)["input_ids"] for text in task["texts"]]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
    with torch.no_grad():
        log_probs = model(torch.tensor([task["ids"]])).logits[0].log_softmax(-1)
    prompt = torch.tensor([task["prompt"]])
    written = model.generate(prompt, max_new_tokens=task["new_tokens"], do_sample=False)
    return {
        "is_fast": tokenizer.is_fast,
        "encoded": encoded,
        "decoded": [tokenizer.decode(ids) for ids in encoded],
        "log_probs": log_probs,
        "written": written[0, prompt.shape[1] :].tolist(),
    }


def main() -> None:
    assert importlib.util.find_spec("megatron_style") is None, sys.path
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.save({folder: results(Path(folder), task) for folder in task["folders"]}, sys.argv[2])
    assert "megatron_style" not in sys.modules


if __name__ == "__main__":
    main()
