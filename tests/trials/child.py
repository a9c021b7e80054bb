"""`swiftlite` in a process of its own, with hooks that a trial asks for: `python -m tests.trials.child HOOKS verb ...`.

HOOKS is JSON with any of these: {rows: FILE}, where the sources of each step are written; {stop: STEP}, after which the run is
asked to stop; {kill: STEP}, at whose checkpoint the process dies between weights and optimizer; {file_limit: [STEP, BYTES]}, the
size that files may have after it.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from swiftlite.dist import checkpoint
from swiftlite.train.run import Run
from tests.conftest import REPO


def start(hooks: dict[str, Any], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a verb in a child and waits for it."""
    command = [sys.executable, "-m", "tests.trials.child", json.dumps(hooks, default=str), *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


def install(hooks: dict[str, Any], patch: Any = setattr) -> None:
    """Puts the hooks in; `patch` may be a monkeypatch's setattr, to take them out again."""
    record, next_group, save_file = Run.record, Run.next_group, checkpoint.save_file
    limit_from, limit = hooks.get("file_limit") or (None, None)

    def watched_group(self):
        group = next_group(self)
        with Path(hooks["rows"]).open("a") as f:
            f.write(json.dumps([self.step + 1, [source for micro in group for source in micro.sources]]) + "\n")
        return group

    def watched_record(self, report):
        record(self, report)
        self.stop.asked = self.step == hooks.get("stop")
        if self.step == limit_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def deadly_save(tensors, path, **more):
        if Path(path).stem == "optimizer" and f"step-{hooks['kill']:06d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        save_file(tensors, path, **more)

    patch(Run, "record", watched_record)
    if "rows" in hooks:
        patch(Run, "next_group", watched_group)
    if "kill" in hooks:
        patch(checkpoint, "save_file", deadly_save)


if __name__ == "__main__":
    from swiftlite.cli.main import run

    install(json.loads(sys.argv[1]))
    sys.exit(run(sys.argv[2:]))
