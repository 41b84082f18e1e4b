"""`python -m tests.torn`: see the package. Prints one line, and ends with 1 if a view was torn."""

from __future__ import annotations

import argparse
import sys

from tests.torn.cases import NUM_WORKERS, all_cases
from tests.torn.reading import Views, read

VIEWS_OF_A_STORE = 250
"""Fewer would be mostly starting and ending it; what comes beyond all cases is more of each."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torn", description=__doc__)
    parser.add_argument("--views", type=int, default=500, help="in all")
    parser.add_argument("--kills", type=int, default=3, help="of workers, in each store")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    cases = all_cases()[: max(1, chosen.views // VIEWS_OF_A_STORE)]
    views = Views()
    for number, case in enumerate(cases):
        num_views = chosen.views * (number + 1) // len(cases) - chosen.views * number // len(cases)
        of_it = read(case, num_views=num_views, num_kills=chosen.kills, seed=chosen.seed)
        views.add(of_it)
        print(f"{case}: {of_it.line()}", file=sys.stderr, flush=True)
    print(f"{len(cases)} stores, {NUM_WORKERS} workers each: {views.line()}")
    print(*views.problems[:20], sep="\n", end="\n" if views.problems else "")
    return 1 if views.problems else 0


if __name__ == "__main__":
    sys.exit(main())
