"""Plays scenes one after the other, and prints their facts as JSON: `python -m tests.runtime RUNTIME SCENE ...`"""

import asyncio
import json
import sys

from tests.runtime.falls import FALLS
from tests.runtime.leftovers import nothing_left
from tests.runtime.places import make_image
from tests.runtime.scenes import SCENES

runtime, *scenes = sys.argv[1:]
if runtime == "container":
    make_image()
facts = []
for scene in scenes:
    with nothing_left(runtime):
        facts.append(asyncio.run({**SCENES, **FALLS}[scene](runtime)))
print(json.dumps(facts))
