"""Plays one scene and prints its facts as JSON."""

import asyncio
import json
import sys

from tests.runtime.falls import FALLS
from tests.runtime.scenes import SCENES

print(json.dumps(asyncio.run({**SCENES, **FALLS}[sys.argv[1]](sys.argv[2]))))
