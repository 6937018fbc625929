"""Run one replica group in a container: ``trainer.py FOLDER SCRIPT ARGUMENTS...``, the entry point of the image.

The variable ``TRAINERS`` is the number of groups of the job. The script locks the first free file of ``FOLDER``, which
all containers share, and runs the group of that number. When a container dies, its lock is free at once, and another
container continues with the number and its checkpoint. A group that would end the same again ends its container with
0, because docker starts it again after every other code.
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
    sys.exit(f"all {trainers} groups run in other containers: set TRAINERS to the number of trainer containers")
os.set_inheritable(lock, True)  # the lock is held until the command ends
Path(tempfile.gettempdir(), "group").write_text(str(number))  # for healthy.py
groups = ["--replicas", "1", "--first-replica", str(number), "--replicas-in-job", str(trainers), "--final-code", "0"]
os.execvp("keepstep", ["keepstep", "run", *groups, "--", *sys.argv[2:]])
