"""Plays scenes one after the other, and prints their facts as JSON: `python -m tests.sandbox RUNTIME SCENE ...`"""

import asyncio
import json
import sys

from tests.sandbox.crash_scenes import CRASH_SCENES
from tests.sandbox.leftovers import nothing_left
from tests.sandbox.places import make_image
from tests.sandbox.scenes import SCENES

runtime, *scenes = sys.argv[1:]
if runtime == "container":
    make_image()
facts = []
for scene in scenes:
    with nothing_left(runtime):
        facts.append(asyncio.run({**SCENES, **CRASH_SCENES}[scene](runtime)))
print(json.dumps(facts))
