"""Plays one scene and prints its facts as JSON."""

import asyncio
import json
import sys

from tests.runtime.falls import FALLS
from tests.runtime.leftovers import nothing_left
from tests.runtime.places import make_image
from tests.runtime.scenes import SCENES

if sys.argv[2] == "container":
    make_image()
with nothing_left(sys.argv[2]):
    facts = asyncio.run({**SCENES, **FALLS}[sys.argv[1]](sys.argv[2]))
print(json.dumps(facts))
