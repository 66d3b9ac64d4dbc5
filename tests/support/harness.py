"""Run by `python -I`: what the language model evaluation harness finds in a folder for transformers.

Arguments: a JSON file with what to do, and where to put the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    model = HFLM(pretrained=task["folder"], trust_remote_code=True, device="cpu", batch_size=3)
    whole = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in task["texts"]]
    behind = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in task["pairs"]]
    found = {
        "texts": model.loglikelihood_rolling(whole),
        "pairs": [likelihood for likelihood, _ in model.loglikelihood(behind)],
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
