"""``python -m fuzzing``: tries jobs until its time is over, or one fails; see ``make fuzz``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
import warnings

from fuzzing.case import Case, drawn_case, simpler
from fuzzing.jobs import check

HANG_S = 100.0
SIMPLER_S_MAX = 120.0
CASES_PER_SEED = 1_000_000
PROCESSES_EVERY = 8  # cases, of which one has worker processes


def failure_of(case: Case) -> BaseException | None:
    """What is wrong with a case; None where it gives what the model says. A case that hangs ends the program."""
    watch = threading.Timer(HANG_S, _hangs, (case,))
    watch.daemon = True
    watch.start()
    try:
        check(case)
    except Exception as error:
        return error
    finally:
        watch.cancel()
        watch.join()
    return None


def _hangs(case: Case) -> None:
    faulthandler.dump_traceback(all_threads=True)
    print(f"hangs: {_line(case)}", flush=True)
    os._exit(1)


def _line(case: Case) -> str:
    return f'make fuzz CASE="{case!r}"'


def _simplest(case: Case, failure: BaseException) -> tuple[Case, BaseException]:
    """The least of the cases that fail in the same way, as far as there is time for it."""
    deadline_s = time.monotonic() + SIMPLER_S_MAX
    found = True
    while found:
        found = False
        for each in simpler(case):
            if time.monotonic() > deadline_s:
                return case, failure
            other = failure_of(each)
            if type(other) is type(failure):
                case, failure, found = each, other, True
                break
    return case, failure


def main() -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(prog="fuzzing", description="Random jobs of the loader, against a naive model.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", help="one case, as it was printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").setLevel(logging.ERROR)
    if options.case:
        failure = failure_of(eval(options.case, {"Case": Case}))
        if failure is not None:
            traceback.print_exception(failure)
        else:
            print("the job gives what the model says")
        return int(failure is not None)
    deadline_s, count = time.monotonic() + options.seconds, 0
    while time.monotonic() < deadline_s:
        number = options.seed * CASES_PER_SEED + count
        case = drawn_case(number, with_processes=not number % PROCESSES_EVERY)
        failure = failure_of(case)
        if failure is not None:
            print(f"fails: {_line(case)}", flush=True)
            case, failure = _simplest(case, failure)
            traceback.print_exception(failure)
            print(f"fails, at its simplest: {_line(case)}", flush=True)
            return 1
        count += 1
    print(f"{count} jobs gave what the model says (seed {options.seed}, {options.seconds:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
