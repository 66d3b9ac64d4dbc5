"""Write text with a model: for one prompt or many, by sampling or beam search, or line by line. See docs/generation.md.

python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("generate")  # imports this file

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Event

from megatron_style.base.command import add_json_flag, command_parser, positive_int, say, show
from megatron_style.base.errors import UserError
from megatron_style.datastore.arguments import add_neighbour_flags, open_retrieval
from megatron_style.evaluate import process_grid
from megatron_style.formats.formats import open_model
from megatron_style.hosts.launcher import accelerator
from megatron_style.inference.arguments import DTYPES
from megatron_style.inference.next_token import by_model
from megatron_style.inference.prompts import check_tokenizer, note_unknown_words, read_prompts
from megatron_style.inference.sampling import Continuation, Sampler
from megatron_style.inference.writer import Writer, WritingOptions, ctrl_c
from megatron_style.parallel.topology import Topology


def main() -> None:
    args = parse_args()
    check_choice(args)
    prompts = [] if args.interactive else read_prompts(args.prompt, args.prompts)
    source = open_model(args.model)
    source.config.model.check_split(args.tensor, "--tensor")
    tokenizer = check_tokenizer(source.tokenizer(), source.config.vocab_size, source.path)
    note_unknown_words(prompts, tokenizer)
    retrieval = open_retrieval(args, source.digest, source.config.vocab_size)
    with process_grid(args.tensor, "generate") as topology:
        check_grid(topology)
        model = source.load(DTYPES[args.dtype], topology.tensor).to(accelerator())
        predict = retrieval.predict_with(model) if retrieval else by_model(model)
        writer = Writer(options_of(args, topology), source.config, tokenizer, model, predict)
        if args.interactive:
            writer.converse()
            return
        # Ranks would learn of Ctrl-C at different tokens, and wait for each other; there it ends them at once.
        with ctrl_c() if topology.tensor.size == 1 else nullcontext(Event()) as asked:
            texts = writer.write(prompts, asked)
    if topology.is_first:
        show_texts(args, prompts, texts)
    if asked.is_set():
        raise KeyboardInterrupt


def check_grid(topology: Topology) -> None:
    """Refuse processes that would not be part of the model: each of them would write the same texts."""
    if topology.data.size > 1:
        tensor = topology.tensor.size
        world = topology.data.size * tensor
        raise UserError(
            f"--tensor is {tensor}, but this launch has {world} processes, all of which share one model; give "
            f"--tensor {world}, or start {tensor}"
        )


def options_of(args: argparse.Namespace, topology: Topology) -> WritingOptions:
    temperature = 1.0 if args.temperature is None else args.temperature
    return WritingOptions(
        sampler=Sampler(temperature, args.top_k, args.top_p),
        beams=args.beams or 0,
        tokens=args.tokens,
        stop=args.stop,
        stop_at_line_end=args.stop_at_line_end,
        seed=args.seed,
        batch_rows=args.batch_rows,
        shows_growth=not args.json and topology.is_first,
    )


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "generate",
        "Continue text with a model, by sampling or beam search.",
        'python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100\n'
        '  python -m megatron_style.generate runs/quickstart/model --prompt "The" --neighbours stores/sotu --k 64',
    )
    add = parser.add_argument
    add("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="the text to continue, - for standard input; may be repeated",
    )
    add("--prompts", type=Path, metavar="FILE", help="a prompt on each line")
    add("--interactive", action="store_true", help="continue typed lines; /help shows its commands")
    add("--tokens", type=positive_int, default=100, metavar="N", help="at most N tokens per text (100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--stop-at-line-end", action="store_true", help="end at the end of the line")
    add("--temperature", type=float, metavar="T", help="0 is greedy, 1 the model's own distribution (1)")
    add("--top-k", type=positive_int, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of total probability P")
    add("--beams", type=positive_int, metavar="N", help="beam search with N beams instead of sampling")
    add("--seed", type=int, default=1, metavar="N")
    add("--batch-rows", type=positive_int, default=16, metavar="N", help="prompts per batch (16)")
    add("--dtype", choices=list(DTYPES), default="float32", help="of the model (float32)")
    add("--tensor", type=positive_int, default=1, metavar="N", help="tensor-parallel ranks; a launcher starts them")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    add_neighbour_flags(parser)
    add_json_flag(parser)
    return parser.parse_args()


def check_choice(args: argparse.Namespace) -> None:
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed is {args.seed}; it must be at least 0 and below 2^63")
    if "" in args.stop:
        raise UserError("--stop is empty; give it the text to end before")
    for flag in ("temperature", "top_k", "top_p"):
        if args.beams and getattr(args, flag) is not None:
            raise UserError(f"--beams {args.beams} does not sample; leave out --{flag.replace('_', '-')}")
    for flag in ("prompt", "prompts", "json", "beams"):
        if args.interactive and getattr(args, flag):
            raise UserError(f"--interactive reads lines and writes as it goes; leave out --{flag}")
    if args.tensor > 1:
        check_input_of_ranks(args)


def check_input_of_ranks(args: argparse.Namespace) -> None:
    """Refuse to read standard input, of which each process would get a part."""
    ranks = f"which --tensor {args.tensor} processes cannot share"
    if args.interactive:
        raise UserError(f"--interactive reads lines, {ranks}; leave out one of the two")
    if "-" in args.prompt:
        raise UserError(f"--prompt - reads standard input, {ranks}; give --prompts FILE")


def show_texts(args: argparse.Namespace, prompts: Sequence[str], texts: Sequence[Continuation]) -> None:
    """Show the results; a single text has been shown already. After Ctrl-C there may be fewer texts than prompts."""
    samples = [
        {"prompt": prompt, "text": text.text, "tokens": len(text.tokens)}
        for prompt, text in zip(prompts, texts, strict=False)
    ]
    if args.json:
        show(samples[0] if len(prompts) == 1 else {"samples": samples}, as_json=True)
    elif len(prompts) == 1:
        say("\n")
    else:
        headings = (prompt.replace("\n", " ") for prompt in prompts)
        say("\n".join(f"== {heading}\n{text.text}\n" for heading, text in zip(headings, texts, strict=False)))
