"""Damage every kind of untrusted file, for as long as you like: each is read, or refused in one line.

python -m tests.fuzz --seconds 600 token_store manifest     # or all targets
python -m tests.fuzz --seconds 0 --first 1234 manifest      # one seed again

Counts go to standard output, failures with their seeds to standard error; the exit code is 1 if there are any."""

from __future__ import annotations

import argparse
import sys

from tests.support.fuzz_targets import TARGETS
from tests.support.fuzzing import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="per target; at least one trial")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the following seeds are tried too")
    args = parser.parse_args()
    if unknown := set(args.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    failed = False
    for name in args.targets or TARGETS:
        found = fuzz(name, first=args.first, seconds=args.seconds)
        print(
            f"{name:<22} trials {found.trials:>8}  refusals {found.refusals:>8}  reads {found.reads:>8}  "
            f"failures {len(found.failures)}",
            flush=True,
        )
        for seed, detail in found.failures.items():
            print(f"{name}, seed {seed}: {detail}", file=sys.stderr, flush=True)
        failed = failed or bool(found.failures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
