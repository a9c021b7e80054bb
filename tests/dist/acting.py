"""A worker for tests of the launcher, without swiftlite's command line: `python acting.py OUTPUT PART`."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from swiftlite.dist import launch, worker
from swiftlite.dist.pulse import Pulse, meet
from swiftlite.recipe.errors import DataError


def act(part: str, output: Path) -> None:
    place = launch.ranks()
    store = meet(timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=60))
    number = torch.ones(1)
    dist.all_reduce(number)
    print(f"rank {place.rank} of {int(number)}, OMP_NUM_THREADS {os.environ['OMP_NUM_THREADS']}", flush=True)
    if part == "data" and place.rank == 1:
        raise DataError("it is no JSON", where="rows.jsonl:3")
    if part == "fault" and place.rank == 1:
        raise ZeroDivisionError("ours")
    if part == "killed" and place.rank == 1 and launch.start() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "stopped":
        pulse = Pulse(store.clone(), place, 2)
        while True:
            pulse.beat(7)
            time.sleep(0.5)
            if place.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(number)
    if part in ("signal", "stuck"):
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1) if part == "signal" else None)
        dist.all_reduce(number)  # both listen
        print("ready", flush=True)
        while not asked:
            time.sleep(0.05)
        time.sleep(1 + place.rank)  # a save that takes longer on one rank
        (output / f"saved-{place.rank}").write_text(str(len(asked)))
        raise KeyboardInterrupt
    dist.all_reduce(number)
    print(f"done, start {launch.start()}")


if __name__ == "__main__":
    output, part = Path(sys.argv[1]), sys.argv[2]
    code = 0
    worker.hush(output)
    try:
        act(part, output)
    except DataError as error:
        code = error.exit_code if worker.report(error, error.exit_code) else 99
    except KeyboardInterrupt as error:
        code = 130 if worker.report(error, 130) else 99
    except Exception as error:
        code = 1 if worker.report(error, 1) else 99
    sys.stdout.flush()
    os._exit(code)
