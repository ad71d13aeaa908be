"""Files of weights go with their owner, also with one that was killed."""

import subprocess
import sys

from relax_rollout.weights import files
from relax_rollout.weights.files import BucketFiles

OWNER = """
import sys, time
from relax_rollout.weights.files import BucketFiles
made = BucketFiles(sys.argv[1])
print(made.create(100)[0], flush=True)
time.sleep(1000)
"""


def test_what_a_killed_process_left_is_removed_and_what_is_owned_stays(tmp_path):
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    foreign = tmp_path / "relax-weights-foreign"
    foreign.mkdir()
    mine = BucketFiles(tmp_path)
    kept, _ = mine.create(10)
    left = owner.stdout.readline().strip()
    second = BucketFiles(tmp_path)
    assert len([*tmp_path.iterdir()]) == 4
    owner.kill()
    owner.wait()
    owner.stdout.close()
    third = BucketFiles(tmp_path)
    assert [str(path) for path in tmp_path.glob("*/bucket-0")] == [kept] != [left]
    for made in (mine, second, third):
        made.close()
    assert [*tmp_path.iterdir()] == [foreign]


def test_without_locks_nothing_of_others_is_touched(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    first, second = BucketFiles(tmp_path), BucketFiles(tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    first.close()
    second.close()
    assert not [*tmp_path.iterdir()]
