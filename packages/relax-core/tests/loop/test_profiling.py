import json

from relax_core.loop import run
from relax_core.run import RunDirectory


def test_only_the_steps_of_the_window_are_profiled(small_run, tmp_path):
    config = small_run(
        run={"steps": 3, "profile_from": 2}, eval={"before": False, "after": False}, checkpoint={"every": 0}
    )
    with RunDirectory.create(tmp_path / "run", config) as directory:
        assert run(config, directory, resume=False) == "finished"
    (file,) = (directory.path / "profile").iterdir()
    assert file.name == "step_2.json"
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names, "sampling and training"
