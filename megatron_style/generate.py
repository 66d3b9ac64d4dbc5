"""Sample text from a model.

python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path

from megatron_style.checkpoint.source import open_model
from megatron_style.config.command import add_json_flag, command_parser, run_command, show
from megatron_style.config.errors import UserError
from megatron_style.inference.sampling import Sampler, generate


def main() -> None:
    args = parse_args()
    check(args)
    source = open_model(args.model)
    config, tokenizer = source.config, source.tokenizer()
    if tokenizer is None:
        raise UserError(f"{args.model}: was trained on token ids without a tokenizer, so there is no text to generate")
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{args.model}: its tokenizer makes {tokenizer.vocab_size} ids, but the model knows {config.vocab_size}; "
            "the tokenizer it was trained with is needed"
        )
    stream = generate(
        source.load(),
        tokenizer.encode(args.prompt),
        Sampler(args.temperature, args.top_k, args.top_p),
        segment_length=config.segment_length,
        cache_length=config.cache_length,
        eos=config.eos,
        seed=args.seed,
    )
    written: list[int] = []
    text = ""
    for token in itertools.islice(stream, args.tokens):
        written.append(token)
        if not args.json:
            # Decode all of it each time: a character may be spread over several tokens.
            longer = tokenizer.decode(written)
            if longer.startswith(text) and not longer.endswith("\ufffd"):
                sys.stdout.write(longer[len(text) :])
                sys.stdout.flush()
                text = longer
    if args.json:
        show({"prompt": args.prompt, "text": tokenizer.decode(written), "tokens": len(written)}, as_json=True)
    else:
        sys.stdout.write(tokenizer.decode(written)[len(text) :] + "\n")


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "generate",
        "Sample text from a model.",
        'python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100',
    )
    parser.add_argument("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=100, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among the most likely tokens of total mass P")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    add_json_flag(parser)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    if not args.prompt.strip():
        raise UserError("--prompt is empty; give it at least one word")
    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}; it must be at least 1")
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or more")
    if args.top_k is not None and args.top_k < 1:
        raise UserError(f"--top-k is {args.top_k}; it must be at least 1")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed is {args.seed}; it must be at least 0 and below 2^63")


if __name__ == "__main__":
    run_command(main)
