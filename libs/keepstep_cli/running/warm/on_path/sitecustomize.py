"""Runs at the start of the template process, before its script. The next ``sitecustomize`` runs in the template too.

The import of this file returns only in the processes that the template forks. There Python goes on as in any other
start, and runs the script.
"""

import os
import sys

if __name__ == "sitecustomize":
    loaded = set(sys.modules)
    try:
        from importlib.util import module_from_spec, spec_from_file_location

        parts = []
        for name in ("template_forks", "template_imports"):
            path = os.path.join(os.path.dirname(os.path.dirname(__file__)), f"{name}.py")  # noqa: PTH118, PTH120 - cheap
            spec = spec_from_file_location(f"keepstep_{name}", path)
            parts.append(module_from_spec(spec))  # type: ignore[arg-type]
            spec.loader.exec_module(parts[-1])  # type: ignore[union-attr]
        forks, imports = parts
        found = forks.serve(os.path.dirname(__file__), loaded, imports.Preload)  # noqa: PTH120
    except BaseException:  # noqa: BLE001 - whatever it is, the template must not run the script
        import traceback

        traceback.print_exc()
        os._exit(71)
    if not found:
        raise ImportError("no other sitecustomize", name="sitecustomize")  # Python expects it, and goes on
