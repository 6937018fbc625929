"""Entry point of the trainer image: takes a number that no other container has, and runs that one replica group.

``trainer.py FOLDER SCRIPT ARGUMENTS...``; the variable ``TRAINERS`` says how many groups the job has. A number is a
lock on a file in a folder that all containers share: one that dies gives it back at once, and with it the checkpoint.
"""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

folder, trainers = Path(sys.argv[1]), int(os.environ["TRAINERS"])
for number in range(trainers):
    lock = os.open(folder / f"group-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
    else:
        break
else:
    sys.exit(f"all {trainers} groups of the job run in other containers: set TRAINERS to as many as are scaled to")
os.set_inheritable(lock, True)  # the lock is held until the command ends
Path(tempfile.gettempdir(), "group").write_text(str(number))  # for healthy.py
groups = ["--replicas", "1", "--first-replica", str(number), "--replicas-in-job", str(trainers)]
os.execvp("keepstep", ["keepstep", "run", *groups, "--", *sys.argv[2:]])
