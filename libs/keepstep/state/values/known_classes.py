"""Classes that a stored value may name. A load never imports a module and calls no class that is not known here.

Known are: the class of the value that the receiver has at the same place; classes that torch's safe loading
(``weights_only=True``) allows because they were registered with ``torch.serialization.add_safe_globals``; and two that
are harmless.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.torch_version import TorchVersion

from keepstep.state.errors import StateMismatch
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import glimpse

_ALWAYS = (Counter, TorchVersion)


def class_name(kind: type) -> str:
    """Return the name of a class in a manifest."""
    return f"{kind.__module__}.{kind.__qualname__}"


def find_class(name: object, base: type, own: object, path: str) -> type:
    """Return the class of that name.

    Args:
        name: see ``class_name``. From an untrusted source.
        base: class that it must inherit.
        own: the value that the receiver has at this place.
        path: of the value, for errors.

    Raises:
        ManifestError: the class does not inherit ``base``.
        StateMismatch: no class of this name is known.
    """
    if type(name) is not str:
        raise ManifestError(f"{path} has an invalid name of a class: {glimpse(name)}")
    registered = (one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals())
    for one in (type(own), *_ALWAYS, *registered):
        if isinstance(one, type) and class_name(one) == name:
            if not issubclass(one, base):
                raise ManifestError(f"{path} is stored as a {base.__name__} of class {name}, which is none here")
            return one
    raise StateMismatch(
        f"{path} is a {name}, which this process does not know: import its module and call "
        f"torch.serialization.add_safe_globals([{name.rpartition('.')[2]}]) before the load (a load never imports what "
        f"a checkpoint names; torchao.optim registers its classes when it is imported)"
    )
