"""Runs at the start of a Python that has this folder on its path. The next ``sitecustomize`` runs afterwards.

A stand-in on the path is not enough for Megatron Core: a folder ``megatron`` beside the script comes first.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

if find_spec("keepstep") is not None:  # a Python of another environment may inherit the path
    import keepstep.compat  # noqa: F401

others = [one for one in sys.path if Path(one) != Path(__file__).parent]
following = PathFinder.find_spec("sitecustomize", others)
if following is not None and following.loader is not None:
    sys.modules["sitecustomize"] = module = module_from_spec(following)
    following.loader.exec_module(module)
