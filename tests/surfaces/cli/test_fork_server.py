"""The process that forks commands for tests outlives clients that are killed at any moment."""

import random
import subprocess

from tests.surfaces.cli.shell import environment, find_quick_command


def test_clients_that_are_killed_take_their_process_and_nothing_else() -> None:
    env, chance = environment(), random.Random(1)
    command = [*find_quick_command(), "--version"]
    for _ in range(8):
        processes = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)
        ]
        killed = chance.choice(processes)
        assert killed.stdout is not None
        if chance.random() < 0.5:
            killed.stdout.read(1)
        killed.kill()
        for process in processes:
            said, _ = process.communicate()
            assert process is killed or (process.returncode, said[:8]) == (0, b"retinue ")
