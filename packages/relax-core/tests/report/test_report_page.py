import json
import re
from html.parser import HTMLParser

import pytest
from relax_core.cli.report import main
from relax_core.report import RunData, read_run, render
from relax_core.report.page import MAX_SAMPLES


class Page(HTMLParser):
    """Elements, attributes that load something, and the embedded data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.data, self._in_data = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.loads += [found[name] for name in ("src", "href") if name in found]
        self._in_data = found.get("id") == "data"

    def handle_endtag(self, tag):
        self._in_data = False

    def handle_data(self, data):
        if self._in_data:
            self.data += data


def test_the_page_loads_nothing(make_run):
    text = render([read_run(make_run("first"))])
    assert Page(text).loads == ["data:,"]
    assert not re.search(r"@import|url\((?!#|`)", text.replace("url(#${inner})", ""))
    assert "default-src 'none'" in text


def test_hostile_completions_stay_data(make_run):
    run = read_run(make_run("first"))
    page = Page(render([run]))
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert json.loads(page.data)["runs"][0]["samples"][0] == run.samples[0]


def test_a_hostile_name_stays_text():
    run = RunData(label="</title><script>x</script>", metrics=[{"step": 1}])
    assert Page(render([run])).tags.count("script") == 2


def test_every_metric_is_described(make_run):
    run = read_run(make_run("first"))
    run.metrics[1]["my_own"] = 3.0
    known = {metric["name"]: metric for metric in json.loads(Page(render([run])).data)["metrics"]}
    assert known["my_own"]["group"] == "other"
    assert known["mtp_loss"]["group"] == "MTP loss"
    assert known["logprob_gap_mean"]["doc"]


def test_a_long_run_keeps_samples_of_all_its_length():
    samples = [{"step": step, "reward": 0.0} for step in range(1, 3 * MAX_SAMPLES + 1)]
    run = RunData(label="a", metrics=[{"step": 1}], samples=samples)
    shown = json.loads(Page(render([run])).data)["runs"][0]
    assert len(shown["samples"]) == MAX_SAMPLES
    assert shown["samplesLeftOut"] == 2 * MAX_SAMPLES
    assert [shown["samples"][i]["step"] for i in (0, 1, -1)] == [1, 4, 3 * MAX_SAMPLES - 2]


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    run = RunData(label="a", metrics=[{"step": 1}], samples=[{"step": 1, "completion": "x very-secret"}])
    assert "very-secret" not in render([run])


def test_the_command_writes_into_the_first_run_or_where_it_is_told(make_run, tmp_path, capsys):
    first, second = make_run("first"), make_run("second")
    assert main([str(first)]) == 0
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    assert main([str(first), str(second), "--output", str(tmp_path / "both.html")]) == 0
    assert len(json.loads(Page((tmp_path / "both.html").read_text()).data)["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{none}"], "is no folder"),
        (["{run}", "{run}"], "given twice"),
        (["{run}", "--output", "{run}/no/such/report.html"], "cannot write"),
        (["{run}", "--output", "/dev/full/x"], "a file is in the way"),
        (["{run}", "--output", "/sys/x.html"], "Permission denied; name a file elsewhere with --output"),
    ],
)
def test_refusals_are_one_line_and_code_2(make_run, tmp_path, capsys, arguments, words):
    run = make_run("first")
    places = {"{run}": str(run), "{none}": str(tmp_path / "none")}
    given = [re.sub(r"\{.*?\}", lambda match: places[match[0]], argument) for argument in arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("relax-report: ")
    assert error.count("\n") == 1
