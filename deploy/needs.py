"""Print the requirements of extras in pyproject.toml, one per line: ``needs.py services durable``."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [need for extra in sys.argv[1:] for need in project["optional-dependencies"][extra]]
print(*project["dependencies"], *extras, sep="\n")
