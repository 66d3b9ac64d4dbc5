"""Score texts with the language model evaluation harness on a folder for transformers; run by `python -I`.

Arguments: a JSON file with the task, and the path of the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    model = HFLM(pretrained=task["folder"], trust_remote_code=True, prefix_token_id=2, device="cpu", batch_size=3)
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in task["texts"]]
    continuations = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in task["pairs"]]
    found = {
        "texts": model.loglikelihood_rolling(rolling),
        "pairs": [likelihood for likelihood, _ in model.loglikelihood(continuations)],
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
