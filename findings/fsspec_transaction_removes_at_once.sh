#!/usr/bin/env bash
# Guess: `with fs.transaction`, of which the documentation says that all files get written or none, leaves everything as
#   it was if its block fails: what the block wrote, put, moved and removed.
# Seen: only writes through open() and pipe() wait for the end. rm() and mv() act at once and are not undone: a block
#   that writes a new checkpoint, removes the old one and fails leaves neither. put() waits in memory, and on a local
#   disk it overwrites at once. Files that another thread writes with the same filesystem object belong to the block,
#   and are thrown away with it.
# Version: fsspec 2026.9.0, LocalFileSystem and MemoryFileSystem.
# Why it matters: keeping the newest checkpoints is a write and a removal. A full disk, or a signal that raises, between
#   the two costs both, and a file of metrics that a thread wrote at that time. A test in memory does not show what put()
#   does on a disk. Remove after the transaction, and give threads instances of their own.
source "$(dirname "$0")/environment"
packages fsspec==2026.9.0
program <<'PYTHON'
import tempfile
import threading
from pathlib import Path

import fsspec
from finding import compare, show_versions

show_versions("fsspec")
folder = tempfile.mkdtemp(dir=".")
Path("new").write_text("new")
FILES = {"old": "old", "other": "other", "new": None}


def after_a_failure(files, root, act):
    """Return the content of each file after a transaction in which ``act`` ran and then an error came."""
    for name, content in FILES.items():
        if content is not None:
            files.pipe(f"{root}/{name}", content.encode())
        elif files.exists(f"{root}/{name}"):
            files.rm(f"{root}/{name}")
    try:
        with files.transaction:
            act(files, root)
            raise InterruptedError
    except InterruptedError:
        paths = {name: f"{root}/{name}" for name in FILES}
        return {name: files.cat(path).decode() if files.exists(path) else None for name, path in paths.items()}


def write_and_remove(files, root):
    files.pipe(f"{root}/new", b"new")
    files.rm(f"{root}/old")


def in_a_thread(files, root):
    thread = threading.Thread(target=files.pipe, args=(f"{root}/new", b"of a thread"))
    thread.start()
    thread.join()


def put(files, root):
    files.put("new", f"{root}/old")


def move(files, root):
    files.mv(f"{root}/old", f"{root}/other")


for name, root in (("local", str(Path(folder).resolve())), ("memory", "/folder")):
    files = fsspec.filesystem(name)
    for words, act, guess, known in (
        ("write new, remove old", write_and_remove, FILES, FILES | {"old": None}),
        ("move old to other", move, FILES, FILES | {"old": None, "other": "old"}),
        ("put a file on old", put, FILES, FILES | ({"old": "new"} if name == "local" else {})),
        ("another thread writes new", in_a_thread, FILES | {"new": "of a thread"}, FILES),
    ):
        subject = f"files after a transaction that failed; {name}, {words}"
        compare(subject, guess=guess, seen=after_a_failure(files, root, act), known=known)
PYTHON
